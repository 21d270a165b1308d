#include "processes.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

namespace pycoll::sim::tests {

int Meeting::run(const std::function<void(Meeting&)>& work) {
  try {
    work(*this);
    return 0;
  } catch (const std::exception& error) {
    std::printf("rank %d: %s\n", rank, error.what());
    page_->failed.store(true);
    return 1;
  }
}

void Meeting::barrier() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  page_->arrived.fetch_add(1);
  passed_ += size;
  while (page_->arrived.load() < passed_) {
    if (page_->failed.load()) throw std::runtime_error("another rank has failed");
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("nobody came");
    ::usleep(50);
  }
}

namespace {

void* shared_page(size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory");
  return memory;
}

}  // namespace

std::vector<int> run_processes(int size, const std::function<void(Meeting&)>& work) {
  auto* page = static_cast<Meeting::Page*>(shared_page(sizeof(Meeting::Page)));
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = ::fork();
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Meeting meeting(page, rank, size);
    std::exit(meeting.run(work));  // as a program ends, with what runs at its end
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    statuses.push_back(status);
  }
  return statuses;
}

std::vector<int> run_threads(int size, const std::function<void(Meeting&)>& work) {
  auto* page = static_cast<Meeting::Page*>(shared_page(sizeof(Meeting::Page)));
  std::vector<int> statuses(static_cast<size_t>(size), -1);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Meeting meeting(page, rank, size);
      statuses[static_cast<size_t>(rank)] = meeting.run(work);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

}  // namespace pycoll::sim::tests
