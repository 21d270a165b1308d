// Ranks of a scenario that are processes, forked before CUDA is used; or threads of this one.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

namespace pycoll::sim::tests {

// What a rank has to meet the others.
class Meeting {
 public:
  static constexpr int kRanks = 8;
  static constexpr size_t kBytes = 256;

  // Until all ranks are here. Throws when one has failed, and after a minute.
  void barrier();

  // Everybody's value, by rank.
  template <class T>
  std::vector<T> exchange(const T& mine) {
    static_assert(sizeof(T) <= kBytes);
    std::memcpy(page_->slots[rank], &mine, sizeof(T));
    barrier();
    std::vector<T> all(size);
    for (int r = 0; r < size; ++r) {
      std::memcpy(static_cast<void*>(&all[r]), page_->slots[r], sizeof(T));
    }
    barrier();
    return all;
  }

  const int rank;
  const int size;

 private:
  struct Page {
    std::atomic<uint32_t> arrived;
    std::atomic<bool> failed;
    std::byte slots[kRanks][kBytes];
  };
  // What `work` says of itself: 0, or 1 and a line of output.
  int run(const std::function<void(Meeting&)>& work);

  Meeting(Page* page, int rank, int size) : rank(rank), size(size), page_(page) {}
  friend std::vector<int> run_processes(int size, const std::function<void(Meeting&)>& work);
  friend std::vector<int> run_threads(int size, const std::function<void(Meeting&)>& work);

  Page* page_;
  uint32_t passed_ = 0;
};

// The wait status of each rank: 0 if `work` ended without an exception.
std::vector<int> run_processes(int size, const std::function<void(Meeting&)>& work);

// The same with threads, where ThreadSanitizer sees what ranks do to each other's memory. Not 0: it
// threw.
std::vector<int> run_threads(int size, const std::function<void(Meeting&)>& work);

}  // namespace pycoll::sim::tests
