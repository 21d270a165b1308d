// Sums in the order of ranks, over messages: a partial sum goes up the chain 0, 1, ..., w-1, each
// rank adding its own behind what it received, and the last rank has the result. So the bits are
// those of one rank that sums everything in shared memory (one_shot, two_shot), for about as much
// traffic as a ring takes; only small vectors pay, with about w hops. Hosts change nothing.
#include "program/builders.h"

namespace pycoll {
namespace {

struct Chain {
  int32_t rank;
  int32_t last;

  explicit Chain(const ProgramRequest& request)
      : rank(request.rank), last(request.world_size - 1) {}
  bool begins() const { return rank == 0; }
  bool ends() const { return rank == last; }

  // A rank below the last: takes the sum so far, adds its own, passes it on.
  Step up(int32_t chunk) const {
    if (begins()) return {.kind = StepKind::send, .src = input(chunk), .to = 1};
    return {.kind = StepKind::recv_reduce_send,
            .src = input(chunk),
            .from = rank - 1,
            .to = rank + 1,
            .wire = wire()};
  }
  // The last rank's own result.
  Step finish(int32_t chunk) const {
    return {.kind = StepKind::recv_reduce,
            .src = input(chunk),
            .dst = output(chunk),
            .from = rank - 1,
            .wire = wire()};
  }
  // The last rank sums for another one, which finishes.
  Step hand_over(int32_t chunk, int32_t owner) const {
    return {.kind = StepKind::recv_reduce_send,
            .src = input(chunk),
            .from = rank - 1,
            .to = owner,
            .wire = wire()};
  }
  // What the owner does with it.
  Lane take_over(int32_t chunk) const {
    return {{{.kind = StepKind::recv, .dst = acc(chunk), .from = last, .wire = Wire::partial},
             {.kind = StepKind::copy, .src = acc(chunk), .dst = output(0)}}};
  }

 private:
  Wire wire() const { return rank == 1 ? Wire::value : Wire::partial; }
};

}  // namespace

// Up and down are lanes of their own, so that a slice on its way down does not wait for one on its
// way up.
Program build_all_reduce_chain(const ProgramRequest& request) {
  const Chain chain(request);
  const int32_t rank = request.rank;
  Program program;
  program.input_chunks = program.output_chunks = 1;
  program.order = Order::rank_order;
  if (chain.ends()) {
    Step turn = chain.finish(0);
    turn.kind = StepKind::recv_reduce_copy_send;
    turn.to = rank - 1;
    program.lanes.push_back({{turn}});
    return program;
  }
  program.lanes.push_back({{chain.up(0)}});
  const Step down = chain.begins()
                        ? Step{.kind = StepKind::recv, .dst = output(0), .from = rank + 1}
                        : Step{.kind = StepKind::recv_copy_send,
                               .dst = output(0),
                               .from = rank + 1,
                               .to = rank - 1};
  program.lanes.push_back({{down}});
  return program;
}

// The last rank sends every owner its block.
Program build_reduce_scatter_chain(const ProgramRequest& request) {
  const Chain chain(request);
  const int32_t w = request.world_size;
  Program program;
  program.input_chunks = program.acc_chunks = w;
  program.output_chunks = 1;
  program.order = Order::rank_order;
  std::vector<Step> up;
  for (int32_t chunk = 0; chunk < w; ++chunk) {
    if (!chain.ends()) {
      up.push_back(chain.up(chunk));
    } else if (chunk != request.rank) {
      up.push_back(chain.hand_over(chunk, chunk));
    } else {
      up.push_back(chain.finish(chunk));
      up.back().dst = output(0);
    }
  }
  program.lanes.push_back({std::move(up)});
  if (!chain.ends()) program.lanes.push_back(chain.take_over(request.rank));
  return program;
}

// The last rank sends the sum to the root.
Program build_reduce_chain(const ProgramRequest& request) {
  const Chain chain(request);
  Program program;
  program.input_chunks = program.output_chunks = program.acc_chunks = 1;
  program.order = Order::rank_order;
  const bool root = request.rank == request.root;
  if (!chain.ends()) {
    program.lanes.push_back({{chain.up(0)}});
    if (root) program.lanes.push_back(chain.take_over(0));
  } else {
    program.lanes.push_back({{root ? chain.finish(0) : chain.hand_over(0, request.root)}});
  }
  return program;
}

}  // namespace pycoll
