// Every environment variable that the core reads: this struct and the table in config.cpp, nowhere
// else.
//
// A communicator takes its own copy when it is made, so two groups may differ and nothing is
// global.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace pycoll {

// What a group promises about the bits of its results, each including those before it
// (docs/semantics.md has them in full).
enum class Determinism : uint8_t {
  ranks,      // the same on every rank
  run,        // and in every run with the same settings
  algorithm,  // and with any settings: contributions are combined in the order of ranks
  kCount,
};
std::string_view name_of(Determinism level);

struct Config {
  std::string algo;        // PYCOLL_ALGO: which algorithm for which size (runtime/selector.h)
  std::string table_file;  // PYCOLL_TABLE: read by the Python layer (pycoll/selection.py)
  Determinism determinism = Determinism::run;  // PYCOLL_DETERMINISM
  uint64_t slot_bytes = 1 << 17;               // PYCOLL_SLOT_BYTES: payload of one message at most
  uint64_t fifo_depth = 4;          // PYCOLL_FIFO_DEPTH: messages in flight between two ranks
  uint64_t window_bytes = 1 << 19;  // PYCOLL_WINDOW_BYTES: one buffer of directly read memory
  int64_t spin_us = -1;             // PYCOLL_SPIN_US: -1 chooses by ranks and CPUs
  double connect_timeout = 300;     // PYCOLL_CONNECT_TIMEOUT: seconds to find and connect all peers
  std::string transport = "auto";   // PYCOLL_TRANSPORT: which transports, in order of preference
  std::string socket_ifname;        // PYCOLL_SOCKET_IFNAME: empty takes the one to the store
  std::string store_host;           // no variable: where the store is reached, if that is known
  uint64_t tcp_connections = 2;     // PYCOLL_TCP_CONNECTIONS: sockets between two processes
  double heartbeat = 10;            // PYCOLL_HEARTBEAT: seconds of silence that mean a lost host
  double stall_warning = 60;        // PYCOLL_STALL_WARNING: seconds until a wait is reported
  std::string isa;                  // PYCOLL_ISA: forces a kernel instruction set; empty: the best
  bool shared_allocator = false;    // PYCOLL_SHARED_ALLOCATOR: large CPU tensors in the arena
  std::string dump_dir;             // PYCOLL_DUMP_DIR: where flight records go when a group fails
  bool blocking_wait = false;  // PYCOLL_BLOCKING_WAIT: wait() of calls on GPUs blocks the caller
  bool high_priority = false;  // PYCOLL_HIGH_PRIORITY: asynchronous calls on GPUs come first there

  // Throws Error(invalid_argument) that names the variable, its value and what is allowed.
  static Config from_env();
};

// One row a variable, for `pycoll doctor` and the docs.
struct ConfigVariable {
  std::string_view name;
  std::string_view help;
  void (*parse)(Config& config, const std::string& text);
  std::string (*show)(const Config& config);
  // Must be the same on all ranks, because it decides what travels between them.
  bool agreed;
  // What users of NCCL call it, read when the variable itself is not set; empty: nothing.
  std::string_view of_nccl = {};
};
std::span<const ConfigVariable> config_variables();

// "8k", "64M", "1g", "max": bytes.
uint64_t parse_bytes(std::string_view text);

}  // namespace pycoll
