#include "runtime/communicator.h"

#include <algorithm>

#include "core/error.h"
#include "runtime/overlap.h"

namespace pycoll {
namespace {

Isa choose_isa(const std::string& name) {
  if (name.empty()) return best_isa();
  for (int i = 0; i < static_cast<int>(Isa::kCount); ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (name_of(isa) == name && isa_available(isa)) return isa;
  }
  fail(ErrorKind::invalid_argument, "PYCOLL_ISA=", name,
       " is not available on this CPU; the best is ", name_of(best_isa()));
}

uint32_t hash_text(std::string_view text) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

const ReduceKernels* kernels_for(const CallRequest& request, Isa isa) {
  if (!reduces(request.collective)) return nullptr;
  const ReduceKernels* kernels = find_reduce_kernels(request.dtype, request.reduce_op, isa);
  if (kernels == nullptr) {
    fail(ErrorKind::not_implemented, name_of(request.collective), " with ",
         name_of(request.reduce_op), " on ", name_of(request.dtype), ": ",
         why_not_reducible(request.dtype, request.reduce_op));
  }
  return kernels;
}

bool equal_blocks(const VectorView& view) {
  const auto differs = [&](const Block& b) { return b.count != view.blocks.front().count; };
  return std::none_of(view.blocks.begin(), view.blocks.end(), differs);
}

uint32_t hash_lengths(const VectorView& view) {
  std::string text;
  for (const Block& block : view.blocks) text += concat(block.count, ",");
  return std::max(hash_text(text), 1u);
}

// What the ranks must agree on about lengths. Those of all_to_all are each pair's own affair: every
// message is compared.
void announce_lengths(const CallRequest& request, CallHeader& header) {
  const bool by_input = request.collective == Collective::reduce ||
                        request.collective == Collective::gather ||
                        request.collective == Collective::all_gather;
  if (request.collective == Collective::all_to_all) return;
  header.count = by_input ? request.input.count() : request.output.count();
  const VectorView& shared = by_input ? request.output : request.input;
  const bool every_rank_knows = request.collective == Collective::all_gather ||
                                request.collective == Collective::reduce_scatter;
  if (every_rank_knows && !equal_blocks(shared)) {
    header.count = shared.count();
    header.layout = hash_lengths(shared);
  }
}

int ranks_on_host_of(int rank, const std::vector<int32_t>& hosts) {
  const int32_t host = hosts[static_cast<size_t>(rank)];
  return static_cast<int>(std::count(hosts.begin(), hosts.end(), host));
}

bool on_several_hosts(const std::vector<int32_t>& hosts) {
  return std::any_of(hosts.begin(), hosts.end(), [](int32_t host) { return host != 0; });
}

// Of the whole vector, from what every rank knows: they must choose alike.
uint64_t elements_to_select_by(const CallRequest& request, uint64_t world_size) {
  const CollectiveTraits& traits = traits_of(request.collective);
  switch (traits.lengths) {
    case Lengths::cut:
      return (traits.output_at_root ? request.input : request.output).count();
    case Lengths::equal:
      return (traits.output_at_root ? request.input : request.output).count() * world_size;
    case Lengths::known:
      return std::max(request.input.count(), request.output.count());
    case Lengths::pairwise:
      break;
  }
  return 0;
}

}  // namespace

Communicator::Communicator(const BootstrapRequest& request, std::shared_ptr<Connector> connector,
                           Nanoseconds timeout)
    : rank_(request.rank),
      world_size_(request.world_size),
      name_(request.prefix),
      config_(request.config),
      timeout_(timeout),
      table_(request.table),
      selector_({config_.algo, table_, config_.determinism, world_size_}),
      isa_(choose_isa(config_.isa)),
      connector_(std::move(connector)),
      transport_(bootstrap(request, *connector_, agreement_)),
      recorder_(request.recorder),
      flight_(open_flight(request)),
      wait_policy_(choose_wait_policy(ranks_on_host_of(rank_, hosts()), config_.spin_us)),
      spin_budget_(wait_policy_),
      executor_(
          *transport_,
          {config_.slot_bytes, static_cast<uint32_t>(config_.fifo_depth), config_.window_bytes},
          rank_),
      messages_(
          *transport_,
          {config_.slot_bytes, static_cast<uint32_t>(config_.fifo_depth), config_.window_bytes},
          rank_, world_size_),
      collective_stall_(config_.stall_warning),
      message_stall_(config_.stall_warning) {}

std::unique_ptr<FlightLog> Communicator::open_flight(const BootstrapRequest& request) const {
  if (recorder_ == nullptr) return nullptr;
  return recorder_->open(
      {agreement_.job_key, request.prefix, transport_->name(), rank_, world_size_});
}

std::shared_ptr<Communicator> Communicator::make(const BootstrapRequest& request,
                                                 std::shared_ptr<Connector> connector,
                                                 Nanoseconds timeout) {
  const auto destroy = [](Communicator* dying) {
    // In a forked child the threads and the peers are the parent's, and so may be a lock that was
    // held while forking: the copy is left alone.
    if (dying->fork_mark_.in_child()) return;
    // The last reference may be dropped by a callback in a progress thread, which cannot join
    // itself: then another thread takes the object apart.
    if (dying->on_progress_thread()) {
      std::thread([dying] { delete dying; }).detach();
    } else {
      delete dying;
    }
  };
  return {new Communicator(request, std::move(connector), timeout), destroy};
}

Communicator::~Communicator() {
  close();
}

void Communicator::set_timeout(Nanoseconds timeout) {
  check_owner();
  // Relaxed: it orders nothing.
  timeout_.store(timeout, std::memory_order_relaxed);
}

uint64_t Communicator::sequence() const {
  check_owner();
  return turn_.sequence();
}

std::map<std::string, uint64_t> Communicator::statistics() const {
  const CallCounters& counters = executor_.counters();
  const auto read = [](const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  return {{"zero_copy_calls", read(counters.zero_copy_calls)},
          {"zero_copy_bytes", read(counters.zero_copy_bytes)},
          {"staged_calls", read(counters.staged_calls)},
          {"staged_bytes", read(counters.staged_bytes)}};
}

void Communicator::check_owner() const {
  if (!fork_mark_.in_child()) return;
  fail(ErrorKind::invalid_argument, "rank ", rank_,
       ": this process was forked after the group was made. Make a group of its own in the child");
}

SelectionInput Communicator::selection_input(Collective collective, uint64_t bytes) const {
  return {.collective = collective,
          .bytes = bytes,
          .ranks = world_size_,
          .transport = transport_->name(),
          .has_window = transport_->window() != nullptr,
          .several_hosts = on_several_hosts(hosts()),
          .fifo_depth = config_.fifo_depth};
}

const Algorithm& Communicator::algorithm_for(Collective collective, uint64_t bytes) const {
  return selector_.select(selection_input(collective, bytes));
}

const Algorithm& Communicator::choose(const CallRequest& request,
                                      const SelectionInput& input) const {
  if (request.algorithm.empty() || request.algorithm == "auto") return selector_.select(input);
  const Algorithm* algorithm = find_algorithm(request.collective, request.algorithm);
  if (algorithm == nullptr) {
    fail(ErrorKind::invalid_argument, "algorithm '", request.algorithm, "' is no algorithm of ",
         name_of(request.collective), "; there are: auto, ", algorithm_names(request.collective));
  }
  const std::string reason = selector_.why_not(*algorithm, input);
  if (!reason.empty()) {
    fail(ErrorKind::invalid_argument, "algorithm ", request.algorithm,
         " cannot run here: ", reason);
  }
  return *algorithm;
}

const Program& Communicator::plan(const Algorithm& algorithm, const CallRequest& request) {
  const auto override = overrides_.find(request.collective);
  if (override != overrides_.end()) return override->second;
  const PlanKey key(request.collective, &algorithm, request.root);
  auto known = plans_.find(key);
  if (known == plans_.end()) {
    known = plans_
                .emplace(key, build_program(algorithm.name, {request.collective, rank_, world_size_,
                                                             request.root, hosts()}))
                .first;
  }
  return known->second;
}

// What runs a call whose algorithm needs leases when there are none; a Program that a test has put
// in has nothing else.
const Program* Communicator::fallback_plan(const Algorithm* algorithm, const CallRequest& request) {
  if (algorithm == nullptr || overrides_.contains(request.collective)) return nullptr;
  return &plan(*algorithm, request);
}

void Communicator::override_program(Program program) {
  validate(program);
  if (program.rank != rank_ || program.world_size != world_size_ ||
      program.lanes.size() > kMaxLanes || program.channels > kMaxChannels) {
    fail(ErrorKind::invalid_argument, "a Program for rank ", program.rank, " of ",
         program.world_size, " with ", program.lanes.size(), " lanes and ", program.channels,
         " channels cannot run on rank ", rank_, " of ", world_size_);
  }
  const Lock lock(mutex_);
  overrides_[program.collective] = std::move(program);
  known_.fill({});
}

Communicator::Means Communicator::examine(const CallRequest& request) const {
  if (request.root < 0 || request.root >= world_size_) {
    fail(ErrorKind::invalid_argument, name_of(request.collective), ": root ", request.root,
         " is not a rank of this group of ", world_size_);
  }
  check_shapes(request, rank_, world_size_);
  check_overlaps(request, rank_);
  const ReduceKernels* kernels = kernels_for(request, isa_);
  const uint64_t elements = elements_to_select_by(request, static_cast<uint64_t>(world_size_));
  SelectionInput input = selection_input(request.collective, elements * size_of(request.dtype));
  input.leases = true;
  const Algorithm& algorithm = choose(request, input);
  input.leases = false;
  return {kernels, algorithm, algorithm.needs_lease ? &selector_.select(input) : nullptr};
}

// But for the sequence number.
CallHeader Communicator::header_of(const CallRequest& request, const Algorithm& algorithm,
                                   Nanoseconds timeout) const {
  CallHeader header;
  announce_lengths(request, header);
  header.deadline_ms = milliseconds(timeout);
  header.collective = request.collective;
  header.dtype = request.dtype;
  header.reduce_op = request.reduce_op;
  header.root = request.root;
  header.algorithm = hash_text(algorithm.name);
  if (request.over.codec != 0) {
    header.codec = request.over.codec;
    header.root = request.over.call;
    header.algorithm ^= request.over.layout;
  }
  return header;
}

CallHeader Communicator::announce_elsewhere(const CallRequest& request) {
  CallHeader header;
  announce_lengths(request, header);
  header.collective = request.collective;
  header.dtype = request.dtype;
  header.reduce_op = request.reduce_op;
  header.codec = request.over.codec;
  header.root = request.over.call;
  return take_place(header);
}

// One lock for both steps: numbers are shown in their order.
CallHeader Communicator::take_place(CallHeader call) {
  const Lock lock(elsewhere_);
  call.sequence = turn_.pass_over();
  transport_->announce_elsewhere(call);
  return call;
}

void Communicator::show_elsewhere(const CallHeader& call) {
  const Lock lock(elsewhere_);
  transport_->announce_elsewhere(call);
}

std::shared_ptr<Operation> Communicator::enqueue(Lock& held, CallRequest&& request) {
  if (dead()) std::rethrow_exception(death_);
  const auto [kernels, algorithm, instead] = examine(request);
  const Program& program = plan(algorithm, request);
  const Program* fallback = fallback_plan(instead, request);
  const Nanoseconds timeout = request.timeout.value_or(timeout_.load(std::memory_order_relaxed));
  const CallHeader header = header_of(request, algorithm, timeout);
  auto operation = std::make_shared<CollectiveOperation>(std::move(request), header, program,
                                                         fallback, kernels, timeout);
  queue_.push_back(operation);
  // Last: a number that was taken must be used.
  operation->input_.call.sequence = turn_.queue();
  if (flight_) flight_->queued(operation->input_.call.sequence);
  tell_driver(held);
  return operation;
}

std::shared_ptr<Operation> Communicator::post(Lock& held, MessageRequest&& request) {
  if (dead()) std::rethrow_exception(death_);
  const char* name = request.receives ? "recv" : "send";
  const bool any = request.receives && request.peer == kAnySource;
  if (!any && (request.peer < 0 || request.peer >= world_size_)) {
    fail(ErrorKind::invalid_argument, name, ": rank ", request.peer,
         " is not a rank of this group of ", world_size_);
  }
  if (request.peer == rank_ || (any && world_size_ == 1)) {
    fail(ErrorKind::invalid_argument, name, ": the peer is the same as the rank of this process, ",
         rank_, "; a rank cannot exchange messages with itself");
  }
  const Nanoseconds timeout = request.timeout.value_or(timeout_.load(std::memory_order_relaxed));
  const uint64_t number = flight_ ? flight_->posted(request) : 0;
  auto operation = std::make_shared<MessageOperation>(std::move(request), timeout, number);
  turn_.become_busy();
  posted_.push_back(operation);
  ++open_messages_;
  tell_driver(held);
  return operation;
}

}  // namespace pycoll
