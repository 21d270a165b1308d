// Calls that run in their caller's thread at once: nothing allocated, no lock, no clock.
//
// What such a call needs is known from the last one of its kind. Everything else, errors too, is
// left to the ordinary way: before anything has happened by answering false, afterwards by turning
// the call into the first operation of the queue.
#include "core/error.h"
#include "runtime/communicator.h"

namespace pycoll {
namespace {

uint64_t elements(const PlainCall::Vector& vector) {
  return vector.block_count * vector.blocks;
}

bool same_kind(const PlainCall& a, const PlainCall& b) {
  const auto like = [](const PlainCall::Vector& x, const PlainCall::Vector& y) {
    return x.block_count == y.block_count && x.blocks == y.blocks;
  };
  return a.collective == b.collective && a.dtype == b.dtype && a.reduce_op == b.reduce_op &&
         a.root == b.root && like(a.input, b.input) && like(a.output, b.output);
}

size_t hash_kind(const PlainCall& call) {
  const uint64_t what = static_cast<uint64_t>(call.collective) |
                        static_cast<uint64_t>(call.dtype) << 8 |
                        static_cast<uint64_t>(call.reduce_op) << 16 |
                        static_cast<uint64_t>(static_cast<uint32_t>(call.root)) << 24;
  const uint64_t counts = call.input.block_count + 31 * call.output.block_count;
  return ((what ^ counts) * 0x9E3779B97F4A7C15u) >> 48;
}

// Apart, or in place as a Program takes it (program.h). What is neither may still be in order, or
// is an error: the ordinary way looks closer.
bool apart_or_in_place(const PlainCall& call, int rank) {
  const uint64_t element = size_of(call.dtype);
  const std::byte* in = call.input.data;
  const std::byte* out = call.output.data;
  const uint64_t in_bytes = elements(call.input) * element;
  const uint64_t out_bytes = elements(call.output) * element;
  if (in_bytes == 0 || out_bytes == 0) return true;
  if (in + in_bytes <= out || out + out_bytes <= in) return true;
  const auto place = [&](const PlainCall::Vector& vector) {
    return vector.data +
           (vector.blocks > 1 ? static_cast<uint64_t>(rank) * vector.block_count * element : 0);
  };
  if (traits_of(call.collective).lengths == Lengths::pairwise) return false;
  return place(call.input) == place(call.output) &&
         (call.input.blocks == 1 || call.output.blocks == 1);
}

void cut(const PlainCall::Vector& vector, size_t element, VectorView& view) {
  view.blocks.resize(vector.blocks);
  std::byte* data = vector.data;
  for (Block& block : view.blocks) {
    block = {data, vector.block_count};
    if (data != nullptr) data += vector.block_count * element;
  }
}

CallRequest request_of(const PlainCall& call) {
  CallRequest request;
  request.timeout = call.timeout;
  request.collective = call.collective;
  request.dtype = call.dtype;
  request.reduce_op = call.reduce_op;
  request.root = call.root;
  cut(call.input, size_of(call.dtype), request.input);
  cut(call.output, size_of(call.dtype), request.output);
  return request;
}

}  // namespace

void Communicator::run(const PlainCall& call, const Interrupt& interrupt) {
  if (!run_at_once(call, interrupt)) run(request_of(call), interrupt);
}

bool Communicator::run_at_once(const PlainCall& call, const Interrupt& interrupt) {
  check_owner();
  if (!turn_.enter()) return false;
  const Known* known = dead() ? nullptr : known_for(call);
  const auto sequence = known != nullptr ? turn_.take_number() : std::nullopt;
  if (!sequence) {
    leave_turn();
    return false;
  }
  prepare(call, *known, *sequence);
  std::exception_ptr thrown;
  try {
    run_until_news(interrupt);
  } catch (...) {
    if (fork_mark_.in_child()) throw;
    thrown = std::current_exception();
  }
  if (thrown == nullptr && begun_ && executor_.done()) {
    if (flight_) flight_->ended_at_once(*sequence);
    std::swap(current_, kept_);
    leave_turn();
  } else {
    finish_queued(thrown, interrupt);
  }
  return true;
}

// nullptr: the ordinary way must be asked.
const Communicator::Known* Communicator::known_for(const PlainCall& call) {
  if (call.reduce_op == ReduceOp::premul_sum || !apart_or_in_place(call, rank_)) return nullptr;
  Known& known = known_[hash_kind(call) % kKnown];
  try {
    if (known.program == nullptr || !same_kind(known.call, call)) learn(call, known);
    if (kept_ == nullptr) make_kept(known);
  } catch (const std::exception&) {
    // Raised again where the caller is told.
    known.program = nullptr;
    return nullptr;
  }
  return &known;
}

void Communicator::learn(const PlainCall& call, Known& known) {
  CallRequest request = request_of(call);
  const auto [kernels, algorithm, instead] = examine(request);
  known.call = call;
  known.kernels = kernels;
  known.header = header_of(request, algorithm, Nanoseconds(0));
  const Lock lock(mutex_);
  known.program = &plan(algorithm, request);
  known.fallback = fallback_plan(instead, request);
  known.shape = executor_.shape_of({known.program,
                                    kernels,
                                    known.header,
                                    std::move(request.input),
                                    std::move(request.output),
                                    nullptr,
                                    {}});
}

// Nothing may fail once a call has its number: so it has room for any call.
void Communicator::make_kept(const Known& known) {
  auto kept = std::make_shared<CollectiveOperation>(CallRequest{}, known.header, *known.program,
                                                    known.fallback, known.kernels, Nanoseconds(0));
  kept->input_.input.blocks.reserve(static_cast<size_t>(world_size_));
  kept->input_.output.blocks.reserve(static_cast<size_t>(world_size_));
  kept_place_ = {kept};
  kept_ = std::move(kept);
}

void Communicator::prepare(const PlainCall& call, const Known& known, uint64_t sequence) {
  CollectiveOperation& operation = *kept_;
  ExecutorInput& in = operation.input_;
  in.program = known.program;
  in.fallback = known.fallback;
  in.kernels = known.kernels;
  in.shape = known.shape;
  in.call = known.header;
  in.call.sequence = sequence;
  operation.timeout_ = call.timeout.value_or(timeout_.load(std::memory_order_relaxed));
  in.call.deadline_ms = milliseconds(operation.timeout_);
  cut(call.input, size_of(call.dtype), in.input);
  cut(call.output, size_of(call.dtype), in.output);
  begun_ = false;
  std::swap(current_, kept_);
}

void Communicator::leave_turn() {
  if (messages_.active()) {
    // Looking for a late peer has taken in messages, whose credit found no room to go back: someone
    // must drive on, or their sender may wait for it until this rank's next call.
    const Lock lock(mutex_);
    turn_.become_busy();
  }
  if (turn_.leave()) return;
  Lock lock(mutex_);
  if (waiters_ > 0) change_.notify_all();
  keep_going(lock);
}

// Something else wants to be driven too, or something was thrown: the call goes on as the first of
// the queue. Its place there was made with it: for want of memory it could neither go on nor end.
void Communicator::finish_queued(const std::exception_ptr& thrown, const Interrupt& interrupt) {
  Lock lock(mutex_);
  const std::shared_ptr<CollectiveOperation> operation = current_;
  queue_.splice(queue_.begin(), kept_place_);
  turn_.become_busy();
  turn_.leave();
  if (thrown != nullptr) drive(lock, interrupt, thrown);
  lock.unlock();
  complete_synchronously(operation, interrupt);
}

}  // namespace pycoll
