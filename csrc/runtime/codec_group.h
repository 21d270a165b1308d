// Collectives over codecs for one group; what is exempt from them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/fork_mark.h"
#include "runtime/codec_call.h"
#include "runtime/coded_message.h"
#include "runtime/host_codec_call.h"

namespace pycoll {

// Calls on the same memory run one after the other, with a codec or without: whoever begins one
// that needs memory of another waits for that one's end first. Strided vectors are not looked at:
// they were copied before, and travel as copies.
class CodecGroup final : public CallHome, public std::enable_shared_from_this<CodecGroup> {
 public:
  // Nothing is exchanged before the first compressed call.
  static std::shared_ptr<CodecGroup> make(std::shared_ptr<Communicator> group);
  ~CodecGroup() override;
  CodecGroup(const CodecGroup&) = delete;
  CodecGroup& operator=(const CodecGroup&) = delete;

  // The first one is collective over the group: its ranks make the lanes. Throws what
  // check_codec_request() does, the group's error when it is dead, what making groups throws, and
  // what the interrupt does. Nothing has begun yet.
  std::shared_ptr<CompressedCall> prepare(CodecRequest request, const Interrupt& interrupt);
  // Calls are ordered: every rank starts the same ones in the same order. May complete the call in
  // this thread.
  void start(const std::shared_ptr<CompressedCall>& call);
  std::shared_ptr<CompressedCall> submit(CodecRequest request,
                                         const Interrupt& interrupt = nullptr) {
    auto call = prepare(std::move(request), interrupt);
    start(call);
    return call;
  }

  // Such a message over codes; what it stays is for the caller to say, by the same rule on both
  // ranks. Not ordered with calls. Throws Error(invalid_argument) for types without codecs.
  MessageRequest coded(MessageRequest request, const CodecChoice& choice);
  // For whoever encodes and decodes it elsewhere: the next number of a send is taken.
  MessageCoding coding_of(const MessageRequest& request, const CodecChoice& choice);

  // No call over a codec is under way. Acquire: then their results are there.
  bool idle() const { return under_way_.load(std::memory_order_acquire) == 0; }
  // By whoever is about to begin a call without a codec: returns when none over a codec is under
  // way on its memory. Throws what the interrupt does.
  void let_end(const CallRequest& request, const Interrupt& interrupt) {
    if (idle()) return;
    let_end(Touched{request.input, request.output, size_of(request.dtype)}, interrupt);
  }

  // What the first call does: makes the lanes, where there are none. `over`: of that call.
  void connect(const Interrupt& interrupt, const OverCodec& over);
  // For a call that is a part of another, which has seen to all that prepare() does: it is begun,
  // and started() is the caller's.
  std::shared_ptr<CompressedCall> begin_part(CodecRequest request);
  // Before the group's own; by any thread, those that wait here included.
  void close();

 private:
  explicit CodecGroup(std::shared_ptr<Communicator> group) : group_(std::move(group)) {}
  void let_end(const Touched& touched, const Interrupt& interrupt);
  std::shared_ptr<CompressedCall> make_call(CodecRequest request);
  void begin(const std::shared_ptr<CompressedCall>& call);
  bool wait_for_lanes(const Interrupt& interrupt);
  void make_lanes(const Interrupt& interrupt, const OverCodec& over);
  void compare_calls();
  [[noreturn]] void refuse_closed() const;
  // Gives the lanes up, here and at the peers: maybe nobody waits for what is under way.
  void end_lanes(const std::string& reason);
  std::shared_ptr<CompressedCall> one_in_conflict(const Touched& touched);

  void check() override;
  void give_up(const std::exception_ptr& error) override;
  std::shared_ptr<const ForkMark> fork_mark() const override { return fork_mark_; }
  // Release: see idle().
  void ended() override { under_way_.fetch_sub(1, std::memory_order_release); }

  const std::shared_ptr<const ForkMark> fork_mark_ = std::make_shared<const ForkMark>();
  const std::shared_ptr<Communicator> group_;
  BufferPool pool_;               // before the lanes, whose threads use it
  std::mutex mutex_;              // held for moments
  std::condition_variable made_;  // or given up
  std::thread::id maker_;         // of the lanes, while it does; guarded by mutex_
  bool closed_ = false;           // guarded by mutex_
  CodecLanes lanes_;              // set once, under mutex_
  HostLanes host_lanes_;          // with them; empty where hosts do not have ranks alike
  std::mutex order_;              // of calls into the first lane
  uint32_t calls_ = 0;            // guarded by order_
  std::vector<std::weak_ptr<CompressedCall>> begun_;  // guarded by order_; some of them have ended
  std::atomic<uint32_t> under_way_{0};
  std::atomic<uint32_t> sends_{0};  // over codecs; relaxed: a number for each
};

}  // namespace pycoll
