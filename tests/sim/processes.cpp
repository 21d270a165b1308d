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

namespace pycoll::sim::tests {

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

std::vector<int> run_processes(int size, const std::function<void(Meeting&)>& work) {
  void* memory = ::mmap(nullptr, sizeof(Meeting::Page), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory");
  auto* page = static_cast<Meeting::Page*>(memory);
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = ::fork();
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    int code = 0;
    try {
      Meeting meeting(page, rank, size);
      work(meeting);
    } catch (const std::exception& error) {
      std::printf("rank %d: %s\n", rank, error.what());
      page->failed.store(true);
      code = 1;
    }
    std::exit(code);  // as a program ends, with what runs at its end
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    statuses.push_back(status);
  }
  return statuses;
}

}  // namespace pycoll::sim::tests
