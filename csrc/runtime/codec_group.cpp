#include "runtime/codec_group.h"

#include <algorithm>
#include <new>

#include "core/error.h"

namespace pycoll {
namespace {

// Random numbers of messages are others than those of calls (see kOfSums of codec_layout.cpp).
constexpr uint32_t kOfMessages = 0x40000000u;

// Returns when it has ended, in whatever way: an error is for who waits for it. Throws what the
// interrupt does.
void see_through(Pending& before, const Interrupt& interrupt) {
  while (!before.done()) {
    try {
      before.wait(kLook, nullptr);
    } catch (...) {
      if (!before.done()) throw;
    }
    if (interrupt) interrupt();
  }
}

}  // namespace

std::shared_ptr<CodecGroup> CodecGroup::make(std::shared_ptr<Communicator> group) {
  const std::shared_ptr<CodecGroup> made(new CodecGroup(std::move(group)));
  made->group_->when_dead([known = std::weak_ptr(made)] {
    const auto self = known.lock();
    if (!self) return;
    try {
      self->group_->throw_if_dead();
    } catch (const std::exception& error) {
      self->end_lanes(error.what());
    }
  });
  return made;
}

CodecGroup::~CodecGroup() {
  close();
}

void CodecGroup::close() {
  if (fork_mark_->in_child()) return;
  std::unique_lock lock(mutex_);
  closed_ = true;
  const bool making = maker_ != std::thread::id();
  const CodecLanes lanes = lanes_;
  const HostLanes host_lanes = host_lanes_;
  lock.unlock();
  // Who makes lanes may wait for a rank that does not come: not beyond the group.
  if (making) group_->close();
  if (!lanes.gather) return;
  host_lanes.close();
  // The first lane's completions submit to the second.
  lanes.exchange->close();
  lanes.gather->close();
}

void CodecGroup::refuse_closed() const {
  group_->throw_if_dead();
  fail(ErrorKind::aborted, "rank ", group_->rank(), " closed the group");
}

// False: there are none, and this thread is to make them.
bool CodecGroup::wait_for_lanes(const Interrupt& interrupt) {
  std::unique_lock lock(mutex_);
  while (true) {
    if (closed_) refuse_closed();
    if (lanes_.gather) return true;
    if (maker_ == std::this_thread::get_id()) {
      fail(ErrorKind::invalid_argument, "rank ", group_->rank(),
           ": a signal handler may not make a compressed call while the first one of the group, "
           "which it has interrupted, waits for the other ranks");
    }
    if (maker_ == std::thread::id()) {
      maker_ = std::this_thread::get_id();
      return false;
    }
    made_.wait_for(lock, kLook);
    lock.unlock();
    group_->throw_if_dead();
    if (interrupt) interrupt();
    lock.lock();
  }
}

void CodecGroup::connect(const Interrupt& interrupt, const OverCodec& over) {
  if (wait_for_lanes(interrupt)) return;
  try {
    make_lanes(interrupt, over);
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      maker_ = {};
    }
    made_.notify_all();
    // Peers may have their lanes already, and would wait there for this rank.
    give_up(std::current_exception());
    throw;
  }
  made_.notify_all();
  // It was told of its end before there were lanes.
  if (group_->dead()) end_lanes("the group has ended");
}

void CodecGroup::make_lanes(const Interrupt& interrupt, const OverCodec& over) {
  CodecLanes made;
  HostLanes between_hosts;
  made.exchange = group_->split(0, interrupt, over);
  made.gather = group_->split(0, interrupt, over);
  if (has_host_lanes(group_->hosts())) between_hosts = HostLanes::make(*group_, interrupt, over);
  const std::lock_guard lock(mutex_);
  if (closed_) refuse_closed();
  lanes_ = std::move(made);
  host_lanes_ = std::move(between_hosts);
  maker_ = {};
}

std::shared_ptr<CompressedCall> CodecGroup::prepare(CodecRequest request,
                                                    const Interrupt& interrupt) {
  group_->check_caller();
  group_->throw_if_dead();
  check_codec_request(*group_, request);
  if (!request.timeout) request.timeout = group_->timeout();
  for (const Touched& touched : request.touched()) {
    while (const auto before = group_->latest_in_conflict(touched)) {
      QueuedOperation operation(group_, before);
      see_through(operation, interrupt);
    }
    let_end(touched, interrupt);
  }
  connect(interrupt, over_of(request));
  try {
    return make_call(std::move(request));
  } catch (const std::bad_alloc&) {
    // No mistake of the caller's: the peers have memory, and would wait for this rank.
    give_up(std::current_exception());
    throw;
  }
}

MessageRequest CodecGroup::coded(MessageRequest request, const CodecChoice& choice) {
  const MessageCoding coding = coding_of(request, choice);
  return over_codes(std::move(request), coding);
}

MessageCoding CodecGroup::coding_of(const MessageRequest& request, const CodecChoice& choice) {
  check_codec(choice.codec);
  if (!can_encode(request.dtype)) {
    fail(ErrorKind::invalid_argument, "a message of ", name_of(request.dtype), " has no codes");
  }
  RandomKey key{choice.seed, 0, static_cast<uint32_t>(group_->rank()) | kOfMessages, 0};
  if (!request.receives) {
    const uint32_t number = sends_.fetch_add(1, std::memory_order_relaxed);
    key.step = choice.step.value_or(number);
  }
  return {choice.codec, key};
}

std::shared_ptr<CompressedCall> CodecGroup::make_call(CodecRequest request) {
  if (host_lanes_.scatter && request.collective == Collective::all_reduce) {
    return std::make_shared<HostCodecCall>(std::move(request), group_->rank(), host_lanes_,
                                           shared_from_this());
  }
  return std::make_shared<CodecCall>(std::move(request), lanes_, pool_, shared_from_this());
}

void CodecGroup::begin(const std::shared_ptr<CompressedCall>& call) {
  const std::lock_guard lock(order_);
  std::erase_if(begun_, [](const std::weak_ptr<CompressedCall>& known) {
    const auto one = known.lock();
    return !one || one->done();
  });
  begun_.push_back(call);
  // Relaxed: who began this call looks at it next, or passes the word on.
  under_way_.fetch_add(1, std::memory_order_relaxed);
  call->start(calls_++, *group_);
}

void CodecGroup::start(const std::shared_ptr<CompressedCall>& call) {
  try {
    begin(call);
  } catch (...) {
    give_up(std::current_exception());
    throw;
  }
  call->started();
}

std::shared_ptr<CompressedCall> CodecGroup::begin_part(CodecRequest request) {
  auto call = make_call(std::move(request));
  begin(call);
  return call;
}

std::shared_ptr<CompressedCall> CodecGroup::one_in_conflict(const Touched& touched) {
  const std::lock_guard lock(order_);
  for (const std::weak_ptr<CompressedCall>& known : begun_) {
    auto call = known.lock();
    if (call && !call->done() && call->in_conflict(touched)) return call;
  }
  return nullptr;
}

void CodecGroup::let_end(const Touched& touched, const Interrupt& interrupt) {
  // The call itself will be refused there.
  if (fork_mark_->in_child()) return;
  while (!idle()) {
    group_->check_caller();
    const auto call = one_in_conflict(touched);
    if (!call) return;
    see_through(*call, interrupt);
  }
}

// What peers cannot have missed ends the group, as it does without codecs.
void CodecGroup::check() {
  group_->throw_if_dead();
  if (const auto reason = group_->peer_abort()) fail(ErrorKind::aborted, *reason);
  compare_calls();
}

// A peer may have come to another call than one of these.
void CodecGroup::compare_calls() {
  // Whoever holds it begins a call, which may take long; who waits looks again soon.
  const std::unique_lock lock(order_, std::try_to_lock);
  if (!lock) return;
  for (const std::weak_ptr<CompressedCall>& known : begun_) {
    const auto call = known.lock();
    if (call && !call->done()) group_->compare_elsewhere(call->announced());
  }
}

void CodecGroup::give_up(const std::exception_ptr& error) {
  std::string reason = "a compressed call failed";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    reason = e.what();
  } catch (...) {
  }
  end_lanes(reason);
  if (!group_->dead()) group_->abort(reason);
}

void CodecGroup::end_lanes(const std::string& reason) {
  CodecLanes known;
  HostLanes between_hosts;
  {
    const std::lock_guard lock(mutex_);
    known = lanes_;
    between_hosts = host_lanes_;
  }
  between_hosts.abort(reason);
  for (const auto& lane : {known.exchange, known.gather}) {
    if (lane && !lane->dead()) lane->abort(reason);
  }
}

}  // namespace pycoll
