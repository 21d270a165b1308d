// The order of one CUDA stream, for ThreadSanitizer.
//
// A runtime that does the work of all streams on one OS thread would make everything ordered: a
// kernel that reads what another stream still writes would look right. So each stream gets a
// timeline of its own; the work of the stream runs inside it, and only what CUDA orders (launching,
// events, synchronising) carries order from one to another:
//
//   stream.enter();                     // its copies, host functions; whatever it did before comes
//   before
//   ... memcpy ...
//   signal(&event); / wait(&event);     // any address stands for an event
//   stream.leave();
//
// Without ThreadSanitizer nothing here does anything. Not for two OS threads at a time.
#pragma once

namespace pycoll::sim {

class Timeline {
 public:
  Timeline();  // begins with what the calling thread has seen
  ~Timeline();
  Timeline(const Timeline&) = delete;

  // Between the two, the OS thread's accesses belong to the timeline. They do not nest.
  void enter();
  void leave();

 private:
  void* fiber_ = nullptr;
  void* left_ = nullptr;  // whom leave() goes back to
};

// What the caller has seen comes before what a later wait() on the same address lets its caller do.
void signal(const void* event);
void wait(const void* event);

}  // namespace pycoll::sim
