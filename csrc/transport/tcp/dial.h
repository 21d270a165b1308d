// Connecting to one process: several addresses, several connections, several attempts.
//
// The addresses are tried in order, a new one every quarter of a second as long as none has
// answered, so that one from which nothing comes back does not hold up the rest. The first that
// shows the right process wins; the other connections go there. Whatever fails is tried again,
// later and later, until the caller's deadline: a listener whose backlog overflows, a host that is
// not up yet. A state machine, so that one thread can dial many.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/tcp/description.h"
#include "transport/tcp/descriptors.h"

namespace pycoll::tcp {

class Dial {
 public:
  Dial(const Description& mine, const Description& theirs, std::shared_ptr<Descriptors> table,
       int buffer);

  // None of the peer's addresses can be tried from here.
  bool is_hopeless() const { return candidates_.empty(); }
  // All of them have refused for seconds. The peer listened before it told its addresses, so it has
  // gone.
  bool is_refused(Clock::time_point now) const;
  // What to wait for, and how long at most.
  void add_to(std::vector<pollfd>& entries) const;
  Clock::time_point due() const { return due_; }
  // Does what can be done without waiting. True when all connections are there.
  bool advance(Clock::time_point now);
  std::vector<Socket> take();

  // Each address and what became of it.
  std::string report() const;

 private:
  struct Attempt {
    Socket socket;
    size_t candidate = 0;
    Id link{};
    bool connected = false;  // waits for the welcome
    size_t received = 0;
    Welcome welcome;
    Clock::time_point until{};
  };
  enum class Outcome { waits, failed, welcomed };

  void launch(Clock::time_point now);
  bool begin(Attempt& attempt, Clock::time_point now);
  Outcome step(Attempt& attempt, Clock::time_point now);
  Outcome receive_welcome(Attempt& attempt);
  bool send_hello(Attempt& attempt);
  void note(size_t candidate, const std::string& what, bool refused = false);

  Description mine_;
  Description theirs_;
  std::shared_ptr<Descriptors> table_;
  int buffer_;  // of prepare_connection()
  std::vector<Candidate> candidates_;
  std::vector<std::string> outcomes_;               // by candidate
  std::vector<bool> refused_;                       // likewise: that was its last outcome
  std::optional<Clock::time_point> refused_since_;  // all of them
  std::vector<Attempt> attempts_;
  std::vector<Socket> done_;
  Id link_{};
  std::optional<size_t> winner_;
  size_t next_ = 0;  // candidate
  int failed_rounds_ = 0;
  Clock::time_point launch_at_{};
  Clock::time_point due_{};
};

// Options of every connection: no delay, keepalive so that a silent host is noticed within
// `heartbeat`. A send `buffer` of 0 bytes is left to the kernel.
void prepare_connection(int socket, Nanoseconds heartbeat, int buffer);

}  // namespace pycoll::tcp
