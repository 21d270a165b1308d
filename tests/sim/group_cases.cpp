// What groups compute, against the references of the device kernels' tests.
#include <unistd.h>

#include "group_call.h"
#include "sim/control.h"

namespace pycoll::sim::tests {
namespace {

using Calls = std::vector<std::unique_ptr<OneCall>>;

void check_calls(GroupRank& rank, Calls& calls, const std::vector<cudaStream_t>& streams) {
  for (const cudaStream_t stream : streams) wait_for_device(rank, stream);
  rank.settle();
  for (const auto& call : calls) call->check(rank.group->path());
}

// Several calls in flight, on two streams.
void run_calls(GroupRank& rank, const GroupSettings& settings) {
  Rng agreed(rank.seed * 31 + 7);
  Rng own(rank.seed * 77 + static_cast<uint64_t>(rank.rank));
  const std::vector<cudaStream_t> streams{new_stream(), new_stream()};
  for (uint64_t done = 0; done < settings.cases;) {
    Calls calls;
    for (uint64_t in_flight = 1 + agreed.below(6); in_flight > 0; --in_flight, ++done) {
      calls.push_back(std::make_unique<OneCall>(draw_call(agreed, rank.ranks), rank));
    }
    rank.settle();
    for (const auto& call : calls) {
      rank.group->enqueue(call->request(), streams[own.below(streams.size())]);
      if (agreed.one_in(4)) rank.group->enqueue(CallRequest{}, streams[0]);  // a barrier
    }
    check_calls(rank, calls, streams);
  }
}

// ---- Messages. ----

// Each pair of ranks exchanges messages, which both sides draw alike.
struct Drawn {
  int from;
  int to;
  uint64_t bytes;
  uint64_t seed;
};

std::vector<Drawn> draw_messages(Rng& rng, int ranks) {
  std::vector<Drawn> messages;
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (from == to) continue;
      for (uint64_t i = rng.below(3); i > 0; --i) {
        messages.push_back({from, to, draw_count(rng) * (rng.one_in(3) ? 5 : 1), rng.next()});
      }
    }
  }
  return messages;
}

void run_messages(GroupRank& rank, const GroupSettings& settings) {
  Rng agreed(rank.seed * 13 + 5);
  const std::vector<cudaStream_t> streams{new_stream()};
  for (uint64_t done = 0; done < settings.cases; ++done) {
    std::vector<std::unique_ptr<Buffer>> hosts;
    std::vector<std::unique_ptr<OnDevice>> vectors;
    std::vector<Bytes> expected;
    std::vector<MessageRequest> batch;
    for (const Drawn& drawn : draw_messages(agreed, rank.ranks)) {
      if (drawn.from != rank.rank && drawn.to != rank.rank) continue;
      const bool receives = drawn.to == rank.rank;
      const Bytes contents =
          make_contents(DType::uint8, ReduceOp::none, drawn.bytes, drawn.seed, Contents::any);
      hosts.push_back(std::make_unique<Buffer>(drawn.bytes, drawn.seed % 7));
      if (!receives) hosts.back()->fill(contents);
      vectors.push_back(std::make_unique<OnDevice>(*hosts.back(), drawn.seed % 5));
      expected.push_back(contents);
      MessageRequest message;
      message.receives = receives;
      message.peer = receives ? drawn.from : drawn.to;
      message.block = {vectors.back()->image_of(hosts.back()->data()), drawn.bytes};
      batch.push_back(message);
    }
    OneCall between(draw_call(agreed, rank.ranks), rank);
    rank.settle();
    rank.group->enqueue(batch, streams[0]);
    rank.group->enqueue(between.request(), streams[0]);
    wait_for_device(rank, streams[0]);
    rank.settle();
    between.check(rank.group->path());
    for (size_t i = 0; i < vectors.size(); ++i) {
      vectors[i]->download("a message");
      const std::string differs = difference(DType::uint8, hosts[i]->contents(), expected[i]);
      check(differs.empty(),
            "message " + std::to_string(i) + " of batch " + std::to_string(done) + ": " + differs);
    }
  }
}

// ---- Graphs. ----

void run_graphs(GroupRank& rank, const GroupSettings& settings) {
  Rng agreed(rank.seed * 91 + 3);
  const std::vector<cudaStream_t> streams{new_stream(), new_stream()};
  for (uint64_t done = 0; done < settings.cases; ++done) {
    Calls calls;
    for (uint64_t i = 1 + agreed.below(3); i > 0; --i) {
      calls.push_back(std::make_unique<OneCall>(draw_call(agreed, rank.ranks), rank));
    }
    // Every other time peers have mapped the vectors before.
    for (int warm = 0; warm < 3 && done % 2 == 1; ++warm) {
      rank.settle();
      for (const auto& call : calls) rank.group->enqueue(call->request(), streams[0]);
      check_calls(rank, calls, streams);
      for (const auto& call : calls) call->renew();
      ::usleep(2000);
    }
    rank.settle();
    // Global: the strictest, of all threads of the process.
    const auto mode = rank.threads ? cudaStreamCaptureModeThreadLocal : cudaStreamCaptureModeGlobal;
    ok(cudaStreamBeginCapture(streams[0], mode), "cudaStreamBeginCapture");
    for (const auto& call : calls) rank.group->enqueue(call->request(), streams[0]);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t graph_exec = nullptr;
    ok(cudaStreamEndCapture(streams[0], &graph), "cudaStreamEndCapture");
    ok(cudaGraphInstantiate(&graph_exec, graph, 0), "cudaGraphInstantiate");
    for (int replay = 0; replay < 3; ++replay) {
      OneCall eager(draw_call(agreed, rank.ranks), rank);
      rank.settle();
      ok(cudaGraphLaunch(graph_exec, streams[0]), "cudaGraphLaunch");
      rank.group->enqueue(eager.request(), streams[1]);
      check_calls(rank, calls, streams);
      eager.check("eager");
      for (const auto& call : calls) call->renew();
    }
    ok(cudaGraphExecDestroy(graph_exec), "cudaGraphExecDestroy");
    ok(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
}

// ---- Vectors where they lie. ----

constexpr size_t kArena = 4 << 20;

// As a caching allocator has.
class Arena {
 public:
  explicit Arena(bool shareable) {
    void* memory = nullptr;
    ok(shareable ? cudaMalloc(&memory, kArena) : cudaMallocAsync(&memory, kArena, nullptr),
       "an arena");
    ok(cudaDeviceSynchronize(), "an arena");
    memory_ = static_cast<std::byte*>(memory);
  }
  ~Arena() { cudaFree(memory_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* data() const { return memory_; }

 private:
  std::byte* memory_;
};

// Calls until this rank has mapped its peers' regions and arenas, and none that is gone.
void require_mapped(GroupRank& rank, std::array<std::byte*, 2> arenas, cudaStream_t stream) {
  // Threads of one process need not import anything.
  if (rank.group->path() != std::string("shared_device") || rank.threads) return;
  const uint64_t wanted = 3 * (static_cast<uint64_t>(rank.ranks) - 1);
  CallShape shape;
  shape.count = rank.control->config().slot_bytes / sizeof(float) + 100;
  for (int tries = 0; tries < 200; ++tries) {
    OneCall call(shape, rank, arenas);
    rank.settle();
    rank.group->enqueue(call.request(), stream);
    wait_for_device(rank, stream);
    rank.settle();
    call.check("mapped");
    ::usleep(2000);
    const std::vector<uint64_t> all = rank.meeting.exchange<uint64_t>(counters().imports);
    if (std::all_of(all.begin(), all.end(), [&](uint64_t n) { return n == wanted; })) return;
  }
  check_equal(counters().imports, wanted, "memory of peers");
}

// Many calls in two arenas, then in others at (maybe) the same addresses.
void run_places(GroupRank& rank, const GroupSettings& settings) {
  Rng agreed(rank.seed * 29 + 1);
  const std::vector<cudaStream_t> streams{new_stream()};
  const bool all_share = rank.seed % 2 == 0;
  for (int arena_number = 0; arena_number < 3; ++arena_number) {
    const Arena inputs(all_share || (rank.rank + arena_number) % 3 != 0);
    const Arena outputs(all_share || (rank.rank + arena_number) % 2 != 0);
    for (uint64_t done = 0; done < settings.cases; ++done) {
      CallShape shape = draw_call(agreed, rank.ranks);
      shape.count = shape.count % 3000 + 1000;
      if (agreed.one_in(2)) shape.collective = Collective::all_reduce;
      if (shape.collective == Collective::all_reduce)
        shape.dtype = DType::float32, shape.op = ReduceOp::sum;
      OneCall call(shape, rank, {inputs.data(), outputs.data()});
      rank.settle();
      rank.group->enqueue(call.request(), streams[0]);
      wait_for_device(rank, streams[0]);
      rank.settle();
      call.check(rank.group->path());
      ::usleep(500);
    }
    if (all_share) require_mapped(rank, {inputs.data(), outputs.data()}, streams[0]);
    rank.meeting.barrier();
  }
}

void run_premul(GroupRank& rank) {
  constexpr int kN = 1000;
  const cudaStream_t stream = new_stream();
  std::vector<float> values(kN);
  float total = 0;
  for (int r = 0; r < rank.ranks; ++r) total += static_cast<float>((r + 1) * (r + 2));
  float* on_device = nullptr;
  ok(cudaMalloc(reinterpret_cast<void**>(&on_device), kN * sizeof(float)), "cudaMalloc");
  CallRequest request;
  request.collective = Collective::all_reduce;
  request.dtype = DType::float32;
  request.reduce_op = ReduceOp::premul_sum;
  request.premul_factor = rank.rank + 2;
  request.input = request.output = {{{reinterpret_cast<std::byte*>(on_device), kN}}};
  for (int time = 0; time < 5; ++time) {
    for (int i = 0; i < kN; ++i) values[i] = static_cast<float>((rank.rank + 1) * (i % 7));
    ok(cudaMemcpy(on_device, values.data(), kN * sizeof(float), cudaMemcpyHostToDevice), "upload");
    rank.settle();
    rank.group->enqueue(request, stream);
    wait_for_device(rank, stream);
    rank.settle();
    ok(cudaMemcpy(values.data(), on_device, kN * sizeof(float), cudaMemcpyDeviceToHost),
       "download");
    for (int i = 0; i < kN; ++i) {
      check_equal(values[i], total * static_cast<float>(i % 7), "element " + std::to_string(i));
    }
    ::usleep(2000);
  }
  ok(cudaFree(on_device), "cudaFree");
}

}  // namespace

void collectives_suite(const GroupSettings& settings) {
  run_group(settings, [&](GroupRank& rank) { run_calls(rank, settings); });
}

void messages_suite(const GroupSettings& settings) {
  run_group(settings, [&](GroupRank& rank) { run_messages(rank, settings); });
}

void graphs_suite(const GroupSettings& settings) {
  run_group(settings, [&](GroupRank& rank) { run_graphs(rank, settings); });
}

void places_suite(const GroupSettings& settings) {
  run_group(settings, [&](GroupRank& rank) { run_places(rank, settings); });
}

void premul_suite(const GroupSettings& settings) {
  run_group(settings, [](GroupRank& rank) { run_premul(rank); });
}

// The groups' order differs from rank to rank.
void two_groups_suite(const GroupSettings& settings) {
  run_group(settings, [&](GroupRank& rank) {
    const auto library = DeviceLibrary::load(PYCOLL_SIMGPU);
    GroupRank other = rank;
    other.group = library->open(rank.control, rank.device);
    const std::vector<cudaStream_t> streams{new_stream(), new_stream()};
    Rng agreed(rank.seed * 17 + 11);
    for (uint64_t done = 0; done < settings.cases; ++done) {
      OneCall first(draw_call(agreed, rank.ranks), rank);
      OneCall second(draw_call(agreed, rank.ranks), rank);
      const bool swapped = rank.rank % 2 == 1;
      rank.settle();
      if (!swapped) rank.group->enqueue(first.request(), streams[0]);
      other.group->enqueue(second.request(), streams[1]);
      if (swapped) rank.group->enqueue(first.request(), streams[0]);
      wait_for_device(rank, streams[0]);
      wait_for_device(other, streams[1]);
      rank.settle();
      first.check("first group");
      second.check("second group");
    }
  });
}

}  // namespace pycoll::sim::tests
