#include "runtime/communicator.h"

#include <unistd.h>

#include "core/error.h"
#include "runtime/float_mode.h"

namespace pycoll {
namespace {

constexpr auto kInterruptPeriod = std::chrono::milliseconds(50);

Isa choose_isa(const std::string& name) {
  if (name.empty()) return best_isa();
  for (int i = 0; i < static_cast<int>(Isa::kCount); ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (name_of(isa) == name && isa_available(isa)) return isa;
  }
  fail(ErrorKind::invalid_argument, "PYCOLL_ISA=", name,
       " is not available on this CPU; the best is ", name_of(best_isa()));
}

uint32_t hash_name(std::string_view name) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

bool reduces(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce_scatter;
}

const ReduceKernels* kernels_for(const CallRequest& request, Isa isa) {
  if (!reduces(request.collective)) return nullptr;
  const ReduceKernels* kernels = find_reduce_kernels(request.dtype, request.reduce_op, isa);
  if (kernels == nullptr) {
    fail(ErrorKind::not_implemented, name_of(request.collective), " with ",
         name_of(request.reduce_op), " on ", name_of(request.dtype), " is not implemented");
  }
  return kernels;
}

}  // namespace

Communicator::Communicator(const BootstrapRequest& request, std::unique_ptr<Connector> connector,
                           Nanoseconds timeout)
    : rank_(request.rank),
      world_size_(request.world_size),
      config_(request.config),
      owner_pid_(::getpid()),
      timeout_(timeout),
      transport_(bootstrap(request, *connector)),
      selector_(config_.algo),
      wait_policy_(choose_wait_policy(world_size_, config_.spin_us)),
      spin_budget_(wait_policy_),
      isa_(choose_isa(config_.isa)),
      executor_(
          *transport_,
          {config_.slot_bytes, static_cast<uint32_t>(config_.fifo_depth), config_.window_bytes},
          rank_) {}

std::shared_ptr<Communicator> Communicator::make(const BootstrapRequest& request,
                                                 std::unique_ptr<Connector> connector,
                                                 Nanoseconds timeout) {
  // The last reference may be dropped by a callback in a progress thread, which cannot join
  // itself: then another thread takes the object apart.
  const auto destroy = [](Communicator* dying) {
    if (dying->on_progress_thread()) {
      std::thread([dying] { delete dying; }).detach();
    } else {
      delete dying;
    }
  };
  return {new Communicator(request, std::move(connector), timeout), destroy};
}

Communicator::~Communicator() {
  if (::getpid() != owner_pid_) {
    // A forked child: the progress threads and the peers belong to the parent. A thread object that
    // still stands for a thread must not be destroyed, and there is nothing to join.
    new std::vector<std::thread>(std::move(progress_));
    return;
  }
  close();
}

void Communicator::set_timeout(Nanoseconds timeout) {
  const Lock lock(mutex_);
  timeout_ = timeout;
}

uint64_t Communicator::sequence() const {
  const Lock lock(mutex_);
  return sequence_;
}

void Communicator::throw_if_unusable() const {
  if (::getpid() != owner_pid_) {
    fail(
        ErrorKind::invalid_argument, "rank ", rank_,
        ": this process was forked after the group was made. Make a group of its own in the child");
  }
  if (dead_.load(std::memory_order_relaxed)) std::rethrow_exception(death_);
}

const Algorithm& Communicator::algorithm_for(Collective collective, uint64_t bytes) const {
  return selector_.select({collective, bytes, transport_->window() != nullptr});
}

const Algorithm& Communicator::choose(const CallRequest& request) const {
  const uint64_t blocks = std::max(request.input.blocks.size(), request.output.blocks.size());
  const SelectionInput input{request.collective, request.count * blocks * size_of(request.dtype),
                             transport_->window() != nullptr};
  if (request.algorithm.empty() || request.algorithm == "auto") return selector_.select(input);
  const Algorithm* algorithm = find_algorithm(request.collective, request.algorithm);
  if (algorithm == nullptr) {
    fail(ErrorKind::invalid_argument, "algorithm '", request.algorithm, "' is no algorithm of ",
         name_of(request.collective), "; there are: auto, ", algorithm_names(request.collective));
  }
  const std::string reason = why_unusable(*algorithm, input);
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
                .emplace(key, build_program(algorithm.name,
                                            {request.collective, rank_, world_size_, request.root}))
                .first;
  }
  return known->second;
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
}

std::shared_ptr<Operation> Communicator::enqueue(Lock& /*held*/, CallRequest request) {
  throw_if_unusable();
  if (request.root < 0 || request.root >= world_size_) {
    fail(ErrorKind::invalid_argument, name_of(request.collective), ": root ", request.root,
         " is not a rank of this group of ", world_size_);
  }
  const ReduceKernels* kernels = kernels_for(request, isa_);
  const Algorithm& algorithm = choose(request);
  const Program& program = plan(algorithm, request);
  const Nanoseconds timeout = request.timeout.value_or(timeout_);

  CallHeader header;
  header.sequence = ++sequence_;
  header.count = request.count;
  header.deadline_ms =
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count());
  header.collective = request.collective;
  header.dtype = request.dtype;
  header.reduce_op = request.reduce_op;
  header.root = request.root;
  header.algorithm = hash_name(algorithm.name);
  auto operation =
      std::make_shared<Operation>(std::move(request), header, program, kernels, timeout);
  queue_.push_back(operation);
  return operation;
}

std::shared_ptr<Operation> Communicator::submit(CallRequest request) {
  Lock lock(mutex_);
  auto operation = enqueue(lock, std::move(request));
  ensure_progress(lock);
  work_.notify_one();
  return operation;
}

void Communicator::run(CallRequest request, const Interrupt& interrupt) {
  std::shared_ptr<Operation> operation;
  {
    Lock lock(mutex_);
    operation = enqueue(lock, std::move(request));
  }
  wait(operation, std::nullopt, interrupt);
}

bool Communicator::wait(const std::shared_ptr<Operation>& operation,
                        std::optional<Nanoseconds> timeout, const Interrupt& interrupt) {
  if (!operation->done()) {
    // A caller that only looks for a moment must not get stuck in driving.
    const bool limited = timeout.has_value();
    const Deadline limit = Deadline::after(timeout.value_or(Nanoseconds::max()));
    Lock lock(mutex_);
    while (!operation->done()) {
      if (limited && limit.passed()) return false;
      if (!driving_ && !limited) {
        drive(lock, interrupt);
        continue;
      }
      ++waiters_;
      change_.wait_for(lock, kInterruptPeriod);
      --waiters_;
      if (interrupt && !operation->done()) {
        lock.unlock();
        interrupt();
        lock.lock();
      }
    }
  }
  if (operation->error()) std::rethrow_exception(operation->error());
  return true;
}

void Communicator::drive(Lock& lock, const Interrupt& interrupt) {
  const std::shared_ptr<Operation> operation = queue_.front();
  driving_ = true;
  lock.unlock();
  std::exception_ptr error;
  std::exception_ptr interruption;
  try {
    execute(*operation, interrupt);
    if (operation->request_.finalize) operation->request_.finalize();
  } catch (const Error& caught) {
    error = std::current_exception();
    // An abort of a peer is passed on as it is: its own note to a third rank may come after our
    // farewell, which that rank would then take for the reason.
    const bool passed_on = caught.kind() == ErrorKind::aborted;
    die(passed_on ? caught.what() : concat("rank ", rank_, " aborted the group: ", caught.what()),
        error, true);
  } catch (...) {
    interruption = std::current_exception();
    const std::string reason =
        concat("rank ", rank_, " was interrupted in ", to_string(operation->call()));
    error = std::make_exception_ptr(Error(ErrorKind::aborted, reason));
    die(reason, error, true);
  }
  lock.lock();
  driving_ = false;
  // die() has ended every queued operation and emptied the queue.
  if (!queue_.empty() && queue_.front() == operation) queue_.pop_front();
  operation->finish(error);
  if (waiters_ > 0) change_.notify_all();
  if (!queue_.empty()) work_.notify_one();
  complete(lock, *operation);
  if (interruption) std::rethrow_exception(interruption);
}

void Communicator::execute(Operation& operation, const Interrupt& interrupt) {
  const IeeeFloatMode ieee;
  // A late call on a group that a peer has given up must not succeed by what was published before.
  if (const auto text = transport_->peer_abort()) fail(ErrorKind::aborted, *text);
  transport_->announce(operation.call());
  executor_.start(operation.input_);
  moved_cpu_ = false;
  started_ = Clock::now();
  Backoff backoff(wait_policy_, spin_budget_);
  while (!executor_.done()) {
    if (executor_.advance()) {
      backoff.reset();
    } else if (backoff.next() == Backoff::Stage::sleep) {
      wait_for_peers(operation, backoff, interrupt);
    }
  }
}

void Communicator::wait_for_peers(Operation& operation, Backoff& backoff,
                                  const Interrupt& interrupt) {
  if (interrupt) interrupt();
  look_for_trouble(operation);
  if (!moved_cpu_ && !wait_policy_.crowded) {
    // Two ranks that share a CPU run in turns until the scheduler notices, which takes it very long
    // when both yield. The higher rank moves away, once an operation.
    for (const int peer : executor_.waiting_for()) {
      if (peer < rank_ && transport_->shares_cpu_with(peer)) {
        moved_cpu_ = move_to_another_cpu();
        if (moved_cpu_) return backoff.reset();
      }
    }
  }
  transport_->prepare_sleep();
  // The last look: nothing that a peer does from here on is missed (transport.h).
  if (executor_.advance() || executor_.done()) {
    transport_->cancel_sleep();
    return backoff.reset();
  }
  if (dead_.load(std::memory_order_acquire)) return transport_->cancel_sleep();
  transport_->sleep(std::min<Nanoseconds>(until_deadline(operation), kInterruptPeriod * 2));
}

}  // namespace pycoll
