// Scenarios on bare transports: one flag at a time, without what the executor adds.
#include <cstring>

#include "scenario.h"

namespace pycoll::stress {

void wait_on(Transport& transport, Nanoseconds patience, const std::function<bool()>& ready) {
  for (int look = 0; look < 20; ++look) {
    if (ready()) return;
  }
  const Deadline deadline = Deadline::after(patience);
  while (!deadline.passed()) {
    transport.prepare_sleep();
    if (ready()) return transport.cancel_sleep();
    transport.sleep(patience);
    if (!ready()) continue;
    check(!deadline.passed(), "a wake-up was lost: the sleep ended by its limit only");
    return;
  }
  throw CheckFailed(concat("nothing came within ", to_seconds(patience), " s"));
}

namespace {

constexpr uint32_t kMessages = 1500;
constexpr size_t kWords = 64 / sizeof(uint64_t);

uint64_t word_of(uint32_t message, size_t word) {
  return mix(uint64_t{message} * 64 + word);
}

// Fewer words than fit, now and then.
size_t words_in(uint32_t message) {
  return message % 5 == 0 ? message % kWords : kWords;
}

void send_all(Transport& transport, Nanoseconds patience) {
  SendEnd& end = transport.sender(1, 0);
  for (uint32_t message = 0; message < kMessages; ++message) {
    std::byte* slot = nullptr;
    wait_on(transport, patience, [&] { return (slot = end.acquire()) != nullptr; });
    for (size_t i = 0; i < words_in(message); ++i) {
      const uint64_t word = word_of(message, i);
      std::memcpy(slot + i * sizeof(word), &word, sizeof(word));
    }
    end.publish({message, static_cast<uint32_t>(words_in(message) * sizeof(uint64_t))});
  }
}

void receive_all(Transport& transport, Nanoseconds patience) {
  RecvEnd& end = transport.receiver(0, 0);
  for (uint32_t message = 0; message < kMessages; ++message) {
    std::optional<Message> found;
    wait_on(transport, patience, [&] { return (found = end.peek()).has_value(); });
    check(found->tag.fingerprint == message, "message ", found->tag.fingerprint, " came where ",
          message, " was due");
    check(found->tag.bytes == words_in(message) * sizeof(uint64_t), "message ", message, " has ",
          found->tag.bytes, " bytes");
    for (size_t i = 0; i < words_in(message); ++i) {
      uint64_t word;
      std::memcpy(&word, found->data + i * sizeof(word), sizeof(word));
      check(word == word_of(message, i), "message ", message, ": word ", i, " is wrong");
    }
    end.release();
  }
}

// One direction only: with traffic both ways, the order that one flag fails to give often comes
// with another, and ThreadSanitizer rightly sees no race.
void fifo(const Settings& settings) {
  uint64_t round = 0;
  do {
    WorldOptions options;
    options.seed = settings.seed + round++;
    run_transports(options, [&](int rank, Transport& transport) {
      rank == 0 ? send_all(transport, settings.patience)
                : receive_all(transport, settings.patience);
    });
  } while (!settings.until.passed());
}

// Two ranks, two buffers, a barrier a round: a lane's window and the cell in turns.
void exchange_windows(Transport& transport, int rank, Nanoseconds patience) {
  Window& window = *transport.window();
  for (uint32_t turn = 0; turn < 2 * kMessages; ++turn) {
    const int lane = turn % 2 == 0 ? 0 : kCellLane;
    const uint32_t round = turn / 2 + 1;
    const int parity = static_cast<int>(round % 2);
    for (size_t i = 0; i < kWords; ++i) {
      const uint64_t word = word_of(round, i) + static_cast<uint64_t>(rank);
      std::memcpy(window.local(lane, parity) + i * sizeof(word), &word, sizeof(word));
    }
    const Arrival mine(round, 1);
    window.arrive(lane, mine);
    wait_on(transport, patience,
            [&] { return window.arrival_of(1 - rank, lane, mine).reached(mine); });
    for (size_t i = 0; i < kWords; ++i) {
      uint64_t word;
      std::memcpy(&word, window.peer(1 - rank, lane, parity) + i * sizeof(word), sizeof(word));
      check(word == word_of(round, i) + static_cast<uint64_t>(1 - rank), "round ", round, ": word ",
            i, " of the peer's window is wrong");
    }
  }
}

void window(const Settings& settings) {
  uint64_t episode = 0;
  do {
    WorldOptions options;
    options.seed = settings.seed + episode++;
    run_transports(options, [&](int rank, Transport& transport) {
      exchange_windows(transport, rank, settings.patience);
    });
  } while (!settings.until.passed());
}

constexpr uint64_t kCalls = 60'000;

CallHeader call_number(uint64_t sequence) {
  CallHeader call;
  call.sequence = sequence;
  call.count = sequence * 3;
  call.deadline_ms = sequence * 5;
  call.root = static_cast<int32_t>(sequence % 1'000'000);
  call.algorithm = static_cast<uint32_t>(sequence * 7);
  return call;
}

void check_call(const CallHeader& call) {
  const CallHeader whole = call_number(call.sequence);
  check(std::memcmp(&call, &whole, sizeof(call)) == 0, "call ", call.sequence,
        " was read half overwritten: count ", call.count, ", deadline ", call.deadline_ms,
        ", algorithm ", call.algorithm);
}

// Reads the slot that is overwritten next, while it is.
void read_calls(Transport& transport) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(30));
  for (uint64_t latest = 0; latest < kCalls; check(!deadline.passed(), "no new calls come")) {
    const auto call = transport.latest_call_of(0);
    if (!call) continue;
    check(call->sequence >= latest, "call ", call->sequence, " is shown as latest after ", latest);
    latest = call->sequence;
    check_call(*call);
    for (int ahead = 0; ahead < 2; ++ahead) {
      const uint64_t oldest = latest + ahead < 64 ? 1 : latest + ahead - 63;
      const auto old = transport.call_of(0, oldest);
      if (!old) continue;
      check(old->sequence == oldest, "asked for call ", oldest, ", got ", old->sequence);
      check_call(*old);
    }
  }
}

void calls(const Settings& settings) {
  do {
    WorldOptions options;
    options.delays = false;
    run_transports(options, [](int rank, Transport& transport) {
      if (rank == 1) return read_calls(transport);
      for (uint64_t sequence = 1; sequence <= kCalls; ++sequence) {
        transport.announce(call_number(sequence));
      }
    });
  } while (!settings.until.passed());
}

}  // namespace

std::vector<Scenario> transport_scenarios() {
  return {
      {"fifo", "one FIFO, one direction, two slots", fifo},
      {"window", "two windows, a barrier a round", window},
      {"calls", "announced calls read while they are overwritten", calls},
  };
}

}  // namespace pycoll::stress
