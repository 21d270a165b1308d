// all_reduce on several hosts: reduce-scatter inside each host, a ring between hosts for each part,
// all-gather inside. Between two hosts one vector's worth of data goes each way, however many ranks
// there are.
//
// The vector has as many parts as the largest host has ranks; on a host with s ranks, part p
// belongs to its (p mod s)-th rank, so hosts may differ. A part is cut into one chunk a host for
// the ring. Wherever two partial sums meet, the one with the lowest rank stands on the left.
#include <algorithm>

#include "program/builders.h"
#include "program/topology.h"

namespace pycoll {
namespace {

int32_t modulo(int32_t value, int32_t size) {
  return (value % size + size) % size;
}

class Hierarchy {
 public:
  Hierarchy(const ProgramRequest& request, std::vector<Step>& steps)
      : rank_(request.rank),
        hosts_(ranks_by_host(request)),
        host_count_(static_cast<int32_t>(hosts_.size())),
        steps_(steps) {
    for (size_t host = 0; host < hosts_.size(); ++host) {
      const auto& ranks = hosts_[host];
      parts_ = std::max(parts_, static_cast<int32_t>(ranks.size()));
      const auto found = std::find(ranks.begin(), ranks.end(), rank_);
      if (found == ranks.end()) continue;
      host_ = static_cast<int32_t>(host);
      local_ = static_cast<int32_t>(found - ranks.begin());
    }
    here_ = hosts_[static_cast<size_t>(host_)];
    size_ = static_cast<int32_t>(here_.size());
  }

  int32_t chunks() const { return parts_ * host_count_; }

  // A ring of this host's ranks: chunks start behind their owner and are summed on the way to it.
  void reduce_scatter_inside() {
    for (int32_t batch = 0; size_ > 1 && batch < batches(); ++batch) {
      for (int32_t hop = 0; hop < size_; ++hop) {
        const int32_t owner = modulo(local_ - 1 - hop, size_);
        const int32_t chunk = owned(owner, batch);
        if (chunk < 0) continue;
        if (hop == 0) {
          steps_.push_back({.kind = StepKind::send, .src = input(chunk), .to = local_at(1)});
          continue;
        }
        const bool last = owner == local_;
        const Ref sum = host_count_ == 1 ? output(chunk) : acc(chunk);
        steps_.push_back({.kind = last ? StepKind::recv_reduce : StepKind::recv_reduce_send,
                          .src = input(chunk),
                          .dst = last ? sum : Ref{},
                          .from = local_at(-1),
                          .to = last ? -1 : local_at(1),
                          .wire = hop == 1 ? Wire::value : Wire::partial,
                          .received_first = lowest_of_locals(owner + 1, hop) < rank_});
      }
    }
  }

  // For each part that this rank owns, a ring of its owners on all hosts.
  void ring_between() {
    if (host_count_ == 1) return;
    for (int32_t part = local_; part < parts_; part += size_) {
      reduce_between(part);
      gather_between(part);
    }
  }

  void all_gather_inside() {
    for (int32_t batch = 0; size_ > 1 && batch < batches(); ++batch) {
      for (int32_t hop = 0; hop < size_; ++hop) {
        const int32_t chunk = owned(modulo(local_ - hop, size_), batch);
        if (chunk < 0) continue;
        if (hop == 0) {
          steps_.push_back({.kind = StepKind::send, .src = output(chunk), .to = local_at(1)});
          continue;
        }
        const bool last = hop == size_ - 1;
        steps_.push_back({.kind = last ? StepKind::recv : StepKind::recv_copy_send,
                          .dst = output(chunk),
                          .from = local_at(-1),
                          .to = last ? -1 : local_at(1)});
      }
    }
  }

 private:
  void reduce_between(int32_t part) {
    const int32_t previous = owner_on(host_ - 1, part);
    const int32_t next = owner_on(host_ + 1, part);
    const auto own = [&](int32_t chunk) { return size_ > 1 ? acc(chunk) : input(chunk); };
    const bool values_come =
        hosts_[static_cast<size_t>(modulo(host_ - 1, host_count_))].size() == 1;
    steps_.push_back({.kind = StepKind::send, .src = own(chunk_of(part, host_ - 1)), .to = next});
    for (int32_t hop = 1; hop < host_count_; ++hop) {
      const int32_t chunk = chunk_of(part, host_ - 1 - hop);
      const bool last = hop == host_count_ - 1;
      steps_.push_back({.kind = last ? StepKind::recv_reduce_copy_send : StepKind::recv_reduce_send,
                        .src = own(chunk),
                        .dst = last ? output(chunk) : Ref{},
                        .from = previous,
                        .to = next,
                        .wire = hop == 1 && values_come ? Wire::value : Wire::partial,
                        .received_first = lowest_of_hosts(host_ - hop, hop) < here_.front()});
    }
  }

  void gather_between(int32_t part) {
    for (int32_t hop = 1; hop < host_count_; ++hop) {
      const bool last = hop == host_count_ - 1;
      steps_.push_back({.kind = last ? StepKind::recv : StepKind::recv_copy_send,
                        .dst = output(chunk_of(part, host_ - hop)),
                        .from = owner_on(host_ - 1, part),
                        .to = last ? -1 : owner_on(host_ + 1, part)});
    }
  }

  int32_t local_at(int32_t offset) const {
    return here_[static_cast<size_t>(modulo(local_ + offset, size_))];
  }
  int32_t owner_on(int32_t host, int32_t part) const {
    const auto& ranks = hosts_[static_cast<size_t>(modulo(host, host_count_))];
    return ranks[static_cast<size_t>(part) % ranks.size()];
  }
  // The chunk of a part that is complete at `host`.
  int32_t chunk_of(int32_t part, int32_t host) const {
    return part * host_count_ + modulo(host, host_count_);
  }

  // Chunks go round the host in batches of one an owner: a rank never sends more than one before it
  // receives, so two slots a FIFO suffice as for any ring. -1: the owner has no such chunk.
  int32_t batches() const { return (parts_ + size_ - 1) / size_ * host_count_; }
  int32_t owned(int32_t owner, int32_t batch) const {
    const int32_t part = owner + batch / host_count_ * size_;
    return part < parts_ ? part * host_count_ + batch % host_count_ : -1;
  }

  // The lowest of `count` ranks of this host from place `first` on, wrapping round.
  int32_t lowest_of_locals(int32_t first, int32_t count) const {
    int32_t lowest = here_[static_cast<size_t>(modulo(first, size_))];
    for (int32_t i = 1; i < count; ++i) {
      lowest = std::min(lowest, here_[static_cast<size_t>(modulo(first + i, size_))]);
    }
    return lowest;
  }
  // The lowest rank on `count` hosts from `first` on, wrapping round.
  int32_t lowest_of_hosts(int32_t first, int32_t count) const {
    int32_t lowest = hosts_[static_cast<size_t>(modulo(first, host_count_))].front();
    for (int32_t i = 1; i < count; ++i) {
      lowest =
          std::min(lowest, hosts_[static_cast<size_t>(modulo(first + i, host_count_))].front());
    }
    return lowest;
  }

  int32_t rank_;
  std::vector<std::vector<int32_t>> hosts_;
  int32_t host_count_;
  int32_t parts_ = 0;
  int32_t host_ = 0;           // this rank's
  int32_t local_ = 0;          // its place there
  int32_t size_ = 0;           // ranks there
  std::vector<int32_t> here_;  // those ranks
  std::vector<Step>& steps_;
};

}  // namespace

Program build_all_reduce_hierarchical(const ProgramRequest& request) {
  Program program;
  program.order = Order::lower_first;
  Hierarchy hierarchy(request, program.lanes.emplace_back().steps);
  program.input_chunks = program.output_chunks = program.acc_chunks = hierarchy.chunks();
  hierarchy.reduce_scatter_inside();
  hierarchy.ring_between();
  hierarchy.all_gather_inside();
  return program;
}

}  // namespace pycoll
