// The device kernels on a GPU, all ranks as streams of this process: checked, or timed. Plain CUDA,
// so the same program runs on the simulated runtime.
//
//   kernels --list                            operations
//   kernels check RANKS [NAMES...]            operations, all if none is named, at small sizes
//                                             against the host
//   kernels replay RANKS REPLAYS              captured graphs, eager calls of other sizes among
//   them kernels time NAME RANKS BYTES [ROUNDS]    one line of JSON; BYTES of a rank's vector of
//   float32
//
// Exit code 0: all as it must be; 1: not; 2: wrong usage.
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "world.h"

namespace pycoll::gpu_tests {
namespace {

constexpr float kScale = 0.5f;

struct Operation {
  std::string name;
  std::string summary;
  bool collective;  // an all_reduce of all ranks; else rank 0 alone
  void (*launch)(World&, const Operation&);
};

using AllReduce = cudaError_t (*)(const cuda::GroupView&, const cuda::AllReduceCall&, cudaStream_t);

template <AllReduce kLaunch>
void all_reduce(World& world, const Operation& operation) {
  const cuda::Call call = world.next_call();
  for (int rank = 0; rank < world.ranks(); ++rank) {
    const cuda::AllReduceCall request{call, world.sum(), world.input(rank), world.output(rank),
                                      world.count()};
    require(kLaunch(world.view(rank), request, world.stream(rank)), operation.name);
  }
}

void all_reduce_direct(World& world, const Operation& operation) {
  const cuda::Call call = world.next_call();
  cuda::PeerVectors vectors;
  for (int rank = 0; rank < world.ranks(); ++rank) {
    vectors.input[rank] = world.input(rank);
    vectors.output[rank] = world.output(rank);
  }
  for (int rank = 0; rank < world.ranks(); ++rank) {
    const cuda::AllReduceCall request{call, world.sum(), nullptr, nullptr, world.count()};
    require(
        cuda::all_reduce_two_shot_direct(world.view(rank), request, vectors, world.stream(rank)),
        operation.name);
  }
}

// The Program of that name, by the executor kernel.
void program(World& world, const Operation& operation) {
  const cuda::Call call = world.next_call();
  for (int rank = 0; rank < world.ranks(); ++rank) {
    const World::Loaded& loaded = world.program(operation.name, rank);
    cuda::ProgramCall request;
    request.call = call;
    request.arithmetic = world.sum();
    request.input = {{world.input(rank)}, {world.count()}, 1};
    request.output = {{world.output(rank)}, {world.count()}, 1};
    request.image = &loaded.image;
    request.steps = loaded.steps.as<cuda::ProgramStep>();
    require(cuda::run_program(world.view(rank), request, world.stream(rank)), operation.name);
  }
}

// What the ranks that share a GPU do after they have met: each sums its part into all outputs.
void reduce_many(World& world, const Operation& operation) {
  cuda::ReduceManyCall request;
  request.arithmetic = world.sum();
  request.sources = request.targets = world.ranks();
  for (int rank = 0; rank < world.ranks(); ++rank) {
    request.input[rank] = world.input(rank);
    request.output[rank] = world.output(rank);
  }
  const uint64_t ranks = static_cast<uint64_t>(world.ranks());
  const uint64_t part = (world.count() + ranks - 1) / ranks;
  for (int rank = 0; rank < world.ranks(); ++rank) {
    request.begin = std::min(static_cast<uint64_t>(rank) * part, world.count());
    request.end = std::min(request.begin + part, world.count());
    require(cuda::reduce_many(request, world.stream(rank)), operation.name);
  }
}

void copy(World& world, const Operation& operation) {
  require(cudaMemcpyAsync(world.output(0), world.input(0), world.count() * sizeof(float),
                          cudaMemcpyDeviceToDevice, world.stream(0)),
          operation.name);
}

template <DType kTo, bool kLooks>
void cast(World& world, const Operation& operation) {
  const cuda::CastCall request{DType::float32,
                               kTo,
                               world.input(0),
                               world.output(0),
                               world.count(),
                               kScale,
                               kLooks ? world.found_inf() : nullptr};
  require(cuda::cast(request, world.stream(0)), operation.name);
}

void scale(World& world, const Operation& operation) {
  const cuda::ScaleCall request{DType::float32, world.input(0), world.output(0), world.count(),
                                kScale};
  require(cuda::scale(request, world.stream(0)), operation.name);
}

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all = {
      {"copy", "cudaMemcpyAsync from device to device", false, &copy},
      {"scale", "float32, times a number", false, &scale},
      {"cast_float16", "float32 to float16, times a number", false, &cast<DType::float16, false>},
      {"cast_check_float16", "the same, with the look for inf and NaN", false,
       &cast<DType::float16, true>},
      {"cast_check_bfloat16", "the same to bfloat16", false, &cast<DType::bfloat16, true>},
      {"reduce_many", "all_reduce of ranks that share a GPU, without their meetings", true,
       &reduce_many},
      {"one_shot_kernel", "all_reduce by hand: all read all", true,
       &all_reduce<&cuda::all_reduce_one_shot>},
      {"two_shot_kernel", "all_reduce by hand: each sums a part", true,
       &all_reduce<&cuda::all_reduce_two_shot>},
      {"two_shot_direct", "the same without staging", true, &all_reduce_direct},
      {"ring", "all_reduce by the Program", true, &program},
      {"tree", "all_reduce by the Program", true, &program},
      {"halving_doubling", "all_reduce by the Program", true, &program},
  };
  return all;
}

const Operation& find(const std::string& name) {
  for (const Operation& operation : operations()) {
    if (operation.name == name) return operation;
  }
  throw std::invalid_argument("no operation " + name + "; see --list");
}

// ---- check ----

// Of element i in rank r's vector: small whole numbers, so that sums are exact in any order.
float value(int rank, uint64_t i, int salt) {
  return static_cast<float>((i * 7 + static_cast<uint64_t>(rank * 13 + salt)) % 17) - 8.0f;
}

void fill(World& world, int salt) {
  for (int rank = 0; rank < world.ranks(); ++rank) {
    std::vector<float> numbers(world.count());
    for (uint64_t i = 0; i < numbers.size(); ++i) numbers[i] = value(rank, i, salt);
    world.write(world.input(rank), numbers.data(), numbers.size() * sizeof(float));
    const std::vector<float> nothing(world.count(), std::numeric_limits<float>::quiet_NaN());
    world.write(world.output(rank), nothing.data(), nothing.size() * sizeof(float));
  }
}

float expected(const World& world, const Operation& operation, uint64_t i, int salt) {
  if (!operation.collective) return value(0, i, salt) * (operation.name == "copy" ? 1 : kScale);
  float sum = 0;
  for (int rank = 0; rank < world.ranks(); ++rank) sum += value(rank, i, salt);
  return sum;
}

// Element i of a vector of the operation's output type, as it lies in memory.
float element(const Operation& operation, const std::vector<std::byte>& memory, uint64_t i) {
  const bool is_half = operation.name.find("float16") != std::string::npos;
  if (!is_half) {
    float x;
    std::memcpy(&x, memory.data() + i * sizeof(x), sizeof(x));
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, memory.data() + i * sizeof(bits), sizeof(bits));
  if (operation.name.find("bfloat16") != std::string::npos) {
    const uint32_t wide = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &wide, sizeof(x));
    return x;
  }
  return __half2float(__half(__half_raw{bits}));
}

void check_outputs(World& world, const Operation& operation, int salt) {
  for (int rank = 0; rank < (operation.collective ? world.ranks() : 1); ++rank) {
    const std::vector<std::byte> got = world.read(world.output(rank), world.count() * 4);
    for (uint64_t i = 0; i < world.count(); ++i) {
      const float x = element(operation, got, i), wanted = expected(world, operation, i, salt);
      if (x == wanted) continue;
      throw std::runtime_error(concat(operation.name, " of ", world.count(), " elements: rank ",
                                      rank, " has ", x, " at ", i, ", not ", wanted));
    }
  }
}

void check_found_inf(World& world, const Operation& operation) {
  const auto found = [&] {
    return *reinterpret_cast<const float*>(world.read(world.found_inf(), sizeof(float)).data());
  };
  if (found() != 0)
    throw std::runtime_error(operation.name + " has found an inf that is not there");
  const float infinite = std::numeric_limits<float>::infinity();
  world.write(world.input(0) + world.count() - 1, &infinite, sizeof(infinite));
  operation.launch(world, operation);
  world.synchronize();
  if (found() != 1) throw std::runtime_error(operation.name + " has not found the inf");
  world.clear_found_inf();
}

int check(int ranks, const std::vector<std::string>& names) {
  int done = 0;
  for (const std::string& name : names) {
    const Operation& operation = find(name);
    World world(ranks, small_geometry(ranks));
    for (const uint64_t count : {1, 7, 64, 1000, 4099}) {
      world.resize(count);
      fill(world, done);
      world.synchronize();
      operation.launch(world, operation);
      world.synchronize();
      check_outputs(world, operation, done);
      if (operation.name.find("check") != std::string::npos) check_found_inf(world, operation);
      ++done;
    }
  }
  std::printf("ok check: %d calls on %d ranks\n", done, ranks);
  return 0;
}

// ---- replay ----

int replay(int ranks, int replays) {
  for (const char* name : {"two_shot_kernel", "ring"}) {
    const Operation& operation = find(name);
    World world(ranks, small_geometry(ranks));
    world.resize(1000);
    operation.launch(world, operation);  // eager at first: Programs are loaded
    world.synchronize();
    Graphs graphs(world, [&] { operation.launch(world, operation); });
    for (int i = 0; i < replays; ++i) {
      const bool looks = i % 100 == 0 || i + 1 == replays;
      if (looks) {
        world.synchronize();
        fill(world, i);
        world.synchronize();
      }
      graphs.launch();
      if (looks) {
        world.synchronize();
        check_outputs(world, operation, i);
      }
      if (i % 7 == 3) {
        world.set_count(static_cast<uint64_t>(i % 999 + 1));
        operation.launch(world, operation);
        world.set_count(1000);
      }
    }
    world.synchronize();
  }
  std::printf("ok replay: %d replays on %d ranks\n", replays, ranks);
  return 0;
}

// ---- time ----

int time(const Operation& operation, int ranks, uint64_t bytes, int rounds) {
  World world(ranks, largest_geometry(ranks));
  world.resize(bytes / sizeof(float));
  const auto run = [&](int times) {
    return world.seconds([&] {
      for (int i = 0; i < times; ++i) operation.launch(world, operation);
    });
  };
  run(2);
  constexpr double kRoundSeconds = 0.02;
  const int times = static_cast<int>(std::clamp(kRoundSeconds / run(1), 1.0, 200.0));
  std::printf("{\"name\": \"%s\", \"ranks\": %d, \"bytes\": %llu, \"calls\": %d, \"seconds\": [",
              operation.name.c_str(), ranks, static_cast<unsigned long long>(bytes), times);
  for (int round = 0; round < rounds; ++round) {
    std::printf("%s%.9g", round > 0 ? ", " : "", run(times) / times);
  }
  std::printf("]}\n");
  return 0;
}

int main(const std::vector<std::string>& arguments) {
  const std::string what = arguments.empty() ? "" : arguments[0];
  const auto number = [&](size_t i) { return std::stoi(arguments.at(i)); };
  if (what == "--list") {
    for (const Operation& operation : operations()) {
      std::printf("%-20s %-10s %s\n", operation.name.c_str(),
                  operation.collective ? "all_reduce" : "element", operation.summary.c_str());
    }
    return 0;
  }
  if (what == "check" && arguments.size() >= 2) {
    std::vector<std::string> names(arguments.begin() + 2, arguments.end());
    if (names.empty()) {
      for (const Operation& operation : operations()) names.push_back(operation.name);
    }
    return check(number(1), names);
  }
  if (what == "replay" && arguments.size() == 3) return replay(number(1), number(2));
  if (what == "time" && arguments.size() >= 4) {
    return time(find(arguments[1]), number(2), std::stoull(arguments[3]),
                arguments.size() > 4 ? number(4) : 11);
  }
  std::fprintf(stderr,
               "usage: kernels --list | check RANKS [NAMES...] | replay RANKS REPLAYS |"
               " time NAME RANKS BYTES [ROUNDS]\n");
  return 2;
}

}  // namespace
}  // namespace pycoll::gpu_tests

int main(int argc, char** argv) {
  // A kernel that is loaded when it is first launched may wait for those that run, and they for it.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  // Ranks wait for each other, so no two of their streams may share a queue.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  try {
    return pycoll::gpu_tests::main({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
