// An all_reduce in particular: it has the most ways.
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "group_call.h"

namespace pycoll::sim::tests {
namespace {

// Every pair in turn.
std::vector<std::pair<DType, ReduceOp>> reducible() {
  std::vector<std::pair<DType, ReduceOp>> pairs;
  for (int dtype = 0; dtype < static_cast<int>(DType::kCount); ++dtype) {
    for (int op = 1; op < static_cast<int>(ReduceOp::kCount); ++op) {
      const std::pair pair(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
      if (find_reduce_kernels(pair.first, pair.second, Isa::baseline) == nullptr) continue;
      pairs.push_back(pair);
    }
  }
  return pairs;
}

// None, one; around those from which on vectors are cut among ranks, and into pieces; larger ones.
uint64_t draw_size(Rng& rng, uint64_t slot_elements) {
  const uint64_t near = rng.below(5);
  switch (rng.below(6)) {
    case 0:
      return near / 2;
    case 1:
      return slot_elements - 2 + near;
    case 2:
      return 64 * (1 + rng.below(12)) - 2 + near;
    case 3:
      return rng.below(20 * slot_elements) + near;
    case 4:
      return rng.below(80 * slot_elements) + near;
    default:
      return rng.below(1000);
  }
}

void run_sums(GroupRank& rank, const GroupSettings& settings) {
  Rng agreed(rank.seed * 43 + 9);
  const auto pairs = reducible();
  const std::vector<cudaStream_t> streams{new_stream(), new_stream()};
  for (uint64_t done = 0; done < settings.cases;) {
    std::vector<std::unique_ptr<OneCall>> calls;
    for (uint64_t in_flight = 1 + agreed.below(3); in_flight > 0; --in_flight, ++done) {
      CallShape shape;
      std::tie(shape.dtype, shape.op) = pairs[agreed.below(pairs.size())];
      // Those that people train with more often.
      constexpr std::array kFloats{DType::float32, DType::float16, DType::bfloat16};
      if (agreed.one_in(2)) {
        shape.dtype = kFloats[agreed.below(kFloats.size())];
        shape.op = agreed.one_in(2) ? ReduceOp::sum : ReduceOp::avg;
      }
      const uint64_t slot = rank.control->config().slot_bytes / size_of(shape.dtype);
      shape.count = draw_size(agreed, std::min<uint64_t>(slot, 2000));
      shape.in_place = agreed.one_in(2);
      shape.offset = agreed.one_in(3) ? agreed.below(16) : 0;
      shape.seed = agreed.next() % 100000;
      calls.push_back(std::make_unique<OneCall>(shape, rank));
    }
    // The second time with other contents in the same memory.
    for (int time = 0; time < 2; ++time) {
      rank.settle();
      for (size_t i = 0; i < calls.size(); ++i) {
        rank.group->enqueue(calls[i]->request(), streams[i % streams.size()]);
      }
      for (const cudaStream_t stream : streams) wait_for_device(rank, stream);
      rank.settle();
      for (const auto& call : calls) {
        call->check(rank.group->path());
        call->renew();
      }
    }
  }
}

float fraction(int rank, uint64_t i) {
  const auto wild = static_cast<uint32_t>((i * 2654435761u) ^ (static_cast<uint32_t>(rank) << 13));
  return (static_cast<float>(wild % 20011) - 10005.0f) / 777.0f;
}

// FNV-1a.
uint64_t hash_of(const std::vector<float>& values) {
  uint64_t hash = 14695981039346656037u;
  for (const float value : values) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}

void check_near(const std::vector<float>& sums, int ranks) {
  for (uint64_t i = 0; i < sums.size(); ++i) {
    double exact = 0, size = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      exact += static_cast<double>(fraction(rank, i));
      size += std::abs(static_cast<double>(fraction(rank, i)));
    }
    check(std::abs(static_cast<double>(sums[i]) - exact) <= ranks * 0x1p-23 * size,
          "element " + std::to_string(i) + " is " + std::to_string(sums[i]) + ", not " +
              std::to_string(exact));
  }
}

void run_bits(GroupRank& rank) {
  const cudaStream_t stream = new_stream();
  for (const uint64_t count : {5u, 1003u, 30011u}) {
    const cuda::DeviceMemory memory(count * sizeof(float));
    CallRequest request;
    request.collective = Collective::all_reduce;
    request.dtype = DType::float32;
    request.reduce_op = ReduceOp::sum;
    request.input = request.output = {{{memory.data(), count}}};
    uint64_t first = 0;
    for (int time = 0; time < 3; ++time) {
      std::vector<float> values(count);
      for (uint64_t i = 0; i < count; ++i) values[i] = fraction(rank.rank, i);
      ok(cudaMemcpy(memory.data(), values.data(), count * sizeof(float), cudaMemcpyHostToDevice),
         "upload");
      ::usleep(static_cast<useconds_t>((rank.rank * 7 + time * 5) % 11 * 300));  // in any order
      rank.settle();
      rank.group->enqueue(request, stream);
      wait_for_device(rank, stream);
      rank.settle();
      ok(cudaMemcpy(values.data(), memory.data(), count * sizeof(float), cudaMemcpyDeviceToHost),
         "download");
      check_near(values, rank.ranks);
      const std::vector<uint64_t> hashes = rank.meeting.exchange(hash_of(values));
      if (time == 0) first = hashes[0];
      for (const uint64_t hash : hashes) check(hash == first, "other bits");
    }
  }
}

}  // namespace

void sums_suite(const GroupSettings& settings) {
  run_group(settings, [&](GroupRank& rank) {
    const std::string path = rank.group->path();
    check(settings.hosts.empty() || path == "hosts", "the path is " + path);
    run_sums(rank, settings);
  });
}

void bits_suite(const GroupSettings& settings) {
  run_group(settings, [](GroupRank& rank) { run_bits(rank); });
}

}  // namespace pycoll::sim::tests
