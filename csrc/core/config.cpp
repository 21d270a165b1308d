#include "core/config.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <utility>

#include "core/error.h"

namespace pycoll {
namespace {

template <typename T>
T parse_number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(ErrorKind::invalid_argument, "'", text, "' is not a number");
  }
  return value;
}

uint64_t bytes_between(const std::string& text, uint64_t least, uint64_t most) {
  const uint64_t value = parse_bytes(text);
  if (value < least || value > most) {
    fail(ErrorKind::invalid_argument, value, " is not between ", least, " and ", most);
  }
  return value;
}

double seconds_between(const std::string& text, double least, double most) {
  const double value = parse_number<double>(text);
  if (!(value >= least && value <= most)) {
    fail(ErrorKind::invalid_argument, value, " is not between ", least, " and ", most);
  }
  return value;
}

// Slots and window chunks start on cache lines.
uint64_t whole_lines(uint64_t bytes) {
  if (bytes % 64 != 0) fail(ErrorKind::invalid_argument, bytes, " is not a multiple of 64");
  return bytes;
}

// Slots are found by message number modulo depth, and the number wraps.
uint64_t power_of_two(uint64_t value) {
  if ((value & (value - 1)) != 0) {
    fail(ErrorKind::invalid_argument, value, " is not a power of two");
  }
  return value;
}

// The words that torch's own switches take.
bool parse_switch(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char each) { return std::toupper(each); });
  for (const char* word : {"1", "Y", "YES", "T", "TRUE", "ON"}) {
    if (text == word) return true;
  }
  for (const char* word : {"0", "N", "NO", "F", "FALSE", "OFF"}) {
    if (text == word) return false;
  }
  fail(ErrorKind::invalid_argument, "'", text, "' is not 0 or 1");
}

Determinism parse_determinism(const std::string& text) {
  for (int i = 0; i < static_cast<int>(Determinism::kCount); ++i) {
    if (name_of(static_cast<Determinism>(i)) == text) return static_cast<Determinism>(i);
  }
  fail(ErrorKind::invalid_argument, "'", text, "' is not ranks, run or algorithm");
}

constexpr ConfigVariable kVariables[] = {
    {"PYCOLL_ALGO",
     "algorithm by size, e.g. all_reduce=recursive_doubling:0-8k,ring:8k-max;broadcast=tree",
     [](Config& c, const std::string& t) { c.algo = t; }, [](const Config& c) { return c.algo; },
     true},
    // Ranks may read it from different places: its rules are what must agree
    // (runtime/bootstrap.cpp).
    {"PYCOLL_TABLE",
     "file of measured rules, as `pycoll tune` writes it; empty: built-in ones only",
     [](Config& c, const std::string& t) { c.table_file = t; },
     [](const Config& c) { return c.table_file; }, false},
    {"PYCOLL_DETERMINISM",
     "results have the same bits: on all ranks (ranks), and in every run (run), and with every "
     "table, transport and memory (algorithm)",
     [](Config& c, const std::string& t) { c.determinism = parse_determinism(t); },
     [](const Config& c) { return std::string(name_of(c.determinism)); }, true},
    {"PYCOLL_SLOT_BYTES",
     "payload of one message, a multiple of 64 (64 to 16M); large vectors take up to four times "
     "that "
     "over a network, 1M at most",
     [](Config& c, const std::string& t) {
       c.slot_bytes = whole_lines(bytes_between(t, 64, 16 << 20));
     },
     [](const Config& c) { return std::to_string(c.slot_bytes); }, true},
    {"PYCOLL_FIFO_DEPTH", "messages in flight between two ranks, a power of two (2 to 64)",
     [](Config& c, const std::string& t) { c.fifo_depth = power_of_two(bytes_between(t, 2, 64)); },
     [](const Config& c) { return std::to_string(c.fifo_depth); }, true},
    {"PYCOLL_WINDOW_BYTES",
     "one buffer of directly read memory, two a lane, a multiple of 64 (4k to 64M)",
     [](Config& c, const std::string& t) {
       c.window_bytes = whole_lines(bytes_between(t, 4096, 64 << 20));
     },
     [](const Config& c) { return std::to_string(c.window_bytes); }, true},
    {"PYCOLL_SPIN_US",
     "microseconds a wait spins before it yields and sleeps; -1 chooses (-1 to 1000000)",
     [](Config& c, const std::string& t) {
       c.spin_us = parse_number<int64_t>(t);
       if (c.spin_us < -1 || c.spin_us > 1'000'000) {
         fail(ErrorKind::invalid_argument, c.spin_us, " is not between -1 and 1000000");
       }
     },
     [](const Config& c) { return std::to_string(c.spin_us); }, false},
    {"PYCOLL_CONNECT_TIMEOUT", "seconds to find and connect all peers (0.1 to 86400)",
     [](Config& c, const std::string& t) { c.connect_timeout = seconds_between(t, 0.1, 86400); },
     [](const Config& c) { return concat(c.connect_timeout); }, false},
    {"PYCOLL_TRANSPORT",
     "auto, or the transports that may be used, best first: shm,tcp; the first that connects a "
     "pair of ranks serves it",
     [](Config& c, const std::string& t) { c.transport = t; },
     [](const Config& c) { return c.transport; }, true},
    {"PYCOLL_SOCKET_IFNAME",
     "network interface of this rank (eth0, say); empty takes the one that reaches the store",
     [](Config& c, const std::string& t) {
       c.socket_ifname = t;
       // "eth0, eth1" is a list too; no interface has a space in its name.
       std::erase_if(c.socket_ifname, [](unsigned char each) { return std::isspace(each) != 0; });
     },
     [](const Config& c) { return c.socket_ifname; }, false},
    {"PYCOLL_TCP_CONNECTIONS", "TCP connections between two processes (1 to 16)",
     [](Config& c, const std::string& t) { c.tcp_connections = bytes_between(t, 1, 16); },
     [](const Config& c) { return std::to_string(c.tcp_connections); }, true},
    {"PYCOLL_HEARTBEAT", "seconds of silence after which a host counts as lost (0.1 to 86400)",
     [](Config& c, const std::string& t) { c.heartbeat = seconds_between(t, 0.1, 86400); },
     [](const Config& c) { return concat(c.heartbeat); }, true},
    {"PYCOLL_STALL_WARNING",
     "seconds after which an operation that gets nowhere is reported on stderr, with the ranks it "
     "waits for; 0 for never (0 to 86400)",
     [](Config& c, const std::string& t) { c.stall_warning = seconds_between(t, 0, 86400); },
     [](const Config& c) { return concat(c.stall_warning); }, false},
    {"PYCOLL_ISA", "kernel instruction set: baseline, avx2, avx512; empty takes the best",
     [](Config& c, const std::string& t) { c.isa = t; }, [](const Config& c) { return c.isa; },
     false},
    {"PYCOLL_SHARED_ALLOCATOR",
     "1 puts every CPU tensor of 1 MiB or more that this process makes into shareable memory; 0 or "
     "1; forked children see what their parent writes there later",
     [](Config& c, const std::string& t) { c.shared_allocator = bytes_between(t, 0, 1) == 1; },
     [](const Config& c) { return std::to_string(int{c.shared_allocator}); }, false},
    {"PYCOLL_DUMP_DIR",
     "directory for the flight records of a process whose group fails, or which gets SIGUSR1; "
     "empty: none are written (`pycoll doctor --dump` reads them)",
     [](Config& c, const std::string& t) { c.dump_dir = t; },
     [](const Config& c) { return c.dump_dir; }, false},
    {"PYCOLL_BLOCKING_WAIT",
     "1: wait() of a call on a GPU blocks the caller until it is done, instead of the stream; 0 or "
     "1 (also read from TORCH_NCCL_BLOCKING_WAIT)",
     [](Config& c, const std::string& t) { c.blocking_wait = parse_switch(t); },
     [](const Config& c) { return std::to_string(int{c.blocking_wait}); }, false,
     "TORCH_NCCL_BLOCKING_WAIT"},
    {"PYCOLL_HIGH_PRIORITY",
     "1: asynchronous calls on GPUs run on a stream of high priority; 0 or 1 (also read from "
     "TORCH_NCCL_HIGH_PRIORITY)",
     [](Config& c, const std::string& t) { c.high_priority = parse_switch(t); },
     [](const Config& c) { return std::to_string(int{c.high_priority}); }, false,
     "TORCH_NCCL_HIGH_PRIORITY"},
};

// The name that is set, and its value; no value: none is.
std::pair<std::string, const char*> find_in_environment(const ConfigVariable& variable) {
  for (const std::string_view name : {variable.name, variable.of_nccl}) {
    const char* text = name.empty() ? nullptr : std::getenv(std::string(name).c_str());
    if (text != nullptr && *text != '\0') return {std::string(name), text};
  }
  return {std::string(variable.name), nullptr};
}

}  // namespace

std::string_view name_of(Determinism level) {
  constexpr std::string_view kNames[] = {"ranks", "run", "algorithm"};
  return kNames[static_cast<size_t>(level)];
}

std::span<const ConfigVariable> config_variables() {
  return kVariables;
}

Config Config::from_env() {
  Config config;
  for (const ConfigVariable& variable : kVariables) {
    const auto [name, text] = find_in_environment(variable);
    if (text == nullptr) continue;
    try {
      variable.parse(config, text);
    } catch (const Error& error) {
      fail(ErrorKind::invalid_argument, name, "=", text, ": ", error.what(), " (", variable.help,
           ")");
    }
  }
  return config;
}

uint64_t parse_bytes(std::string_view text) {
  if (text == "max") return std::numeric_limits<uint64_t>::max();
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view suffix(end, text.data() + text.size() - end);
  int shift = -1;
  if (suffix.empty()) shift = 0;
  if (suffix == "k" || suffix == "K") shift = 10;
  if (suffix == "m" || suffix == "M") shift = 20;
  if (suffix == "g" || suffix == "G") shift = 30;
  if (error != std::errc() || shift < 0 ||
      value > (std::numeric_limits<uint64_t>::max() >> shift)) {
    fail(ErrorKind::invalid_argument, "'", text,
         "' is not a size (a number with k, M or G, or max)");
  }
  return value << shift;
}

}  // namespace pycoll
