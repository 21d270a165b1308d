// Suites of the device kernels, run directly on the executor.
#pragma once

#include "device_call.h"
#include "native/random.h"
#include "scenario.h"

namespace pycoll::sim::tests {

struct Suite {
  std::string name;
  std::string summary;
  // Throws if something is wrong; `cases` of them, drawn from the seed. Returns how many it ran.
  uint64_t (*run)(const Settings& settings, uint64_t cases);
};

std::vector<Suite> device_suites();

// One after the other 0..70, powers of two and one less and more up to 4096; then odd ones.
uint64_t size_of_case(uint64_t index);
constexpr uint64_t kSizes = 71 + 3 * 6 + 4;

uint64_t all_reduce_suite(const Settings& settings, uint64_t cases);
uint64_t program_suite(const Settings& settings, uint64_t cases);
uint64_t replay_suite(const Settings& settings, uint64_t cases);
uint64_t barrier_suite(const Settings& settings, uint64_t cases);
uint64_t message_suite(const Settings& settings, uint64_t cases);
uint64_t sweep_suite(const Settings& settings, uint64_t cases);
uint64_t covering_suite(const Settings& settings, uint64_t cases);
uint64_t shared_device_suite(const Settings& settings, uint64_t cases);
uint64_t cast_suite(const Settings& settings, uint64_t cases);
uint64_t scale_suite(const Settings& settings, uint64_t cases);
uint64_t fused_suite(const Settings& settings, uint64_t cases);
uint64_t encode_suite(const Settings& settings, uint64_t cases);
uint64_t decode_suite(const Settings& settings, uint64_t cases);
uint64_t choice_suite(const Settings& settings, uint64_t cases);
uint64_t failure_suite(const Settings& settings, uint64_t cases);

}  // namespace pycoll::sim::tests
