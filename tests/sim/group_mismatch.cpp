// Ranks that call different things, or do not come.
#include <algorithm>
#include <cstring>

#include "group_failures.h"

namespace pycoll::sim::tests {
namespace {

// What one rank does differently, and what is said of it.
struct Difference {
  const char* name;
  const char* said;
  // A call of `count` floats; `differs`: on the last rank.
  void (*change)(CallRequest& request, int ranks, bool differs);
};

constexpr uint64_t kCount = 3 * 4 * 5 * 64;  // in equal parts for 2, 3 and 4 ranks

void cut(VectorView& view, int ranks) {
  const Block whole = view.blocks[0];
  const uint64_t each = whole.count / static_cast<uint64_t>(ranks);
  view.blocks.clear();
  for (int r = 0; r < ranks; ++r) {
    view.blocks.push_back({whole.data + static_cast<uint64_t>(r) * each * sizeof(float), each});
  }
}

const Difference kDifferences[] = {
    {"size", "sizes differ",
     [](CallRequest& request, int, bool differs) {
       if (!differs) return;
       request.input.blocks[0].count -= 60;
       request.output = request.input;
     }},
    {"dtype", "dtypes differ",
     [](CallRequest& request, int, bool differs) {
       if (differs) request.dtype = DType::int32;
     }},
    {"operation", "reduce operations differ",
     [](CallRequest& request, int, bool differs) {
       if (differs) request.reduce_op = ReduceOp::max;
     }},
    {"root", "roots differ",
     [](CallRequest& request, int ranks, bool differs) {
       request.collective = Collective::broadcast;
       request.reduce_op = ReduceOp::none;
       request.root = differs ? ranks - 1 : 0;
     }},
    // No rank is the root that it names, so none has an output.
    {"root of a reduce", "roots differ",
     [](CallRequest& request, int ranks, bool differs) {
       request.collective = Collective::reduce;
       request.root = differs ? 0 : ranks - 1;
       request.output.blocks.clear();
     }},
    {"collective", "operations differ",
     [](CallRequest& request, int ranks, bool differs) {
       if (!differs) return;
       request.collective = Collective::all_gather;
       request.reduce_op = ReduceOp::none;
       cut(request.output, ranks);
       request.input.blocks = {request.output.blocks.back()};
     }},
    {"barrier", "operations differ",
     [](CallRequest& request, int, bool differs) {
       if (differs) request = CallRequest{};
     }},
    {"lengths of blocks", "blocks' lengths differ",
     [](CallRequest& request, int ranks, bool differs) {
       request.collective = Collective::reduce_scatter;
       std::byte* const behind =
           request.input.blocks[0].data + request.input.count() * sizeof(float);
       cut(request.input, ranks);
       const size_t mine = differs ? static_cast<size_t>(ranks) - 1 : 0;
       if (differs) {
         request.input.blocks[0].count -= 4;
         request.input.blocks[1].count -= 8;
       }
       request.output.blocks = {{behind, request.input.blocks[mine].count}};
     }},
};

void check_differs(GroupRank& rank, const Difference& difference, uint64_t scale) {
  FailureCall call(kCount * scale);
  const std::vector<float> before(kCount * scale, 1 + static_cast<float>(rank.rank));
  const size_t bytes = before.size() * sizeof(float);
  // Calls that all agree on come first: peers map the memory, and what is compared is of this one.
  for (int warm = 0; warm < 3; ++warm) {
    rank.group->enqueue(call.request, call.stream.get());
    check(cudaStreamSynchronize(call.stream.get()) == cudaSuccess, "warm up");
    ::usleep(2000);
  }
  check(
      cudaMemcpy(call.memory.data(), before.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess &&
          cudaDeviceSynchronize() == cudaSuccess,
      "upload");
  rank.meeting.barrier();
  const int last = rank.ranks - 1;
  difference.change(call.request, rank.ranks, rank.rank == last);
  std::string said;
  try {
    rank.group->enqueue(call.request, call.stream.get());
    said = error_of(rank).what();
  } catch (const Error& error) {
    said = error.what();  // a peer was quicker
  }
  check_says(said, difference.said);
  check_says(said, "rank " + std::to_string(last));
  check_dead(rank, call, said);
  std::vector<float> after(before.size());
  check(cudaMemcpy(after.data(), call.memory.data(), bytes, cudaMemcpyDeviceToHost) == cudaSuccess,
        "download");
  check(after == before, "memory was written");
}

// Two ranks exchange messages that are not of one length.
void check_message_differs(GroupRank& rank) {
  FailureCall call;
  if (rank.rank < 2) {
    MessageRequest message;
    message.receives = rank.rank == 0;
    message.peer = 1 - rank.rank;
    message.block = {call.memory.data(), rank.rank == 0 ? 80u : 40u};
    rank.group->enqueue(std::vector<MessageRequest>{message}, call.stream.get());
  }
  const std::string said = error_of(rank).what();
  check_says(said, "80 bytes");
  check_says(said, "40 bytes");
  check_dead(rank, call, said);
}

}  // namespace

void mismatch_suite(const GroupSettings& settings) {
  for (const Difference& difference : kDifferences) {
    // Staged; the first also where it lies, since there its length counts.
    for (const uint64_t scale : {uint64_t{1}, uint64_t{16}}) {
      if (scale > 1 && &difference != kDifferences) continue;
      try {
        run_group(settings, [&](GroupRank& rank) { check_differs(rank, difference, scale); });
      } catch (const std::exception& error) {
        throw std::runtime_error(std::string(difference.name) + ": " + error.what());
      }
    }
  }
  run_group(settings, check_message_differs);
}

void absent_suite(const GroupSettings& settings) {
  const int last = settings.ranks - 1;
  for (const bool replays : {false, true}) {
    run_group(settings, [&](GroupRank& rank) {
      FailureCall call;
      call.request.timeout = std::chrono::milliseconds(700);
      const cudaStream_t stream = call.stream.get();
      cudaGraphExec_t graph_exec = nullptr;
      if (replays) {
        cudaGraph_t graph = nullptr;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess, "begin");
        rank.group->enqueue(call.request, stream);
        check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "end");
        check(cudaGraphInstantiate(&graph_exec, graph, 0) == cudaSuccess, "instantiate");
        check(cudaGraphLaunch(graph_exec, stream) == cudaSuccess, "launch");
      } else {
        rank.group->enqueue(call.request, stream);
      }
      check(cudaStreamSynchronize(stream) == cudaSuccess, "the call that all make");
      rank.group->check();
      rank.meeting.barrier();
      const auto began = Clock::now();
      if (rank.rank != last) {
        if (replays) {
          check(cudaGraphLaunch(graph_exec, stream) == cudaSuccess, "launch");
        } else {
          call.request.reduce_op = ReduceOp::max;
          rank.group->enqueue(call.request, stream);
        }
      }
      const Error error = error_of(rank);
      const auto took = Clock::now() - began;
      check(took > std::chrono::milliseconds(600), "an error before its time");
      check(took < std::chrono::seconds(4), "an error long after its time");
      const std::string said = error.what();
      check_says(said, replays ? "rank" : "rank " + std::to_string(last));
      check_dead(rank, call, said);
      rank.meeting.barrier();
    });
  }
}

}  // namespace pycoll::sim::tests
