// The device kernels on a GPU, all ranks as streams of this process: checked, or timed. Plain CUDA,
// so the same program runs on the simulated runtime.
//
//   kernels --list                         operations
//   kernels check RANKS [NAMES...]         operations, all if none is named, at small sizes against
//                                          the host
//   kernels codecs LONGEST                 codecs of up to so many values, against the host
//   kernels lists CASES SEED               kernels over lists of tensors, against the host
//   kernels replay RANKS REPLAYS           captured graphs, eager calls of other sizes among them
//   kernels time NAME RANKS BYTES [ROUNDS] one line of JSON; BYTES of a rank's vector of float32
//
// Exit code 0: all as it must be; 1: not; 2: wrong usage.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>

#include "codecs.h"
#include "group_views.h"
#include "lists.h"
#include "numbers.h"
#include "world.h"

namespace pycoll::gpu_tests {
namespace {

constexpr float kScale = 0.5f;

enum class Kind { element, all_reduce, check, codec };

struct Operation {
  std::string name;
  std::string summary;
  // element: of rank 0 alone. check: an all_reduce that nobody times. codec: checked by "codecs".
  Kind kind;
  void (*launch)(World&, const Operation&);
  // Types that it is checked with, beside float32.
  std::vector<DType> types = {};
  std::optional<DType> result = std::nullopt;  // of casts; else the type of the vectors

  bool is_collective() const { return kind == Kind::all_reduce || kind == Kind::check; }
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

template <CodecKind kKind, bool kStochastic = false>
void run_encoder(World& world, const Operation&) {
  launch_encode(world, {kKind, kStochastic});
}
template <CodecKind kKind, int32_t kCodes = 1>
void run_decoder(World& world, const Operation&) {
  launch_decode(world, {kKind, false, kCodes});
}

const std::vector<Operation>& operations() {
  const std::vector<DType> half = {DType::float16, DType::bfloat16};
  const std::vector<DType> any = {DType::float16, DType::bfloat16, DType::float64, DType::int32,
                                  DType::int64};
  static const std::vector<Operation> all = {
      {"copy", "cudaMemcpyAsync from device to device", Kind::element, &copy},
      {"scale", "float32, times a number", Kind::element, &scale},
      {"cast_float16",
       "float32 to float16, times a number",
       Kind::element,
       &cast<DType::float16, false>,
       {},
       DType::float16},
      {"cast_check_float16",
       "the same, with the look for inf and NaN",
       Kind::element,
       &cast<DType::float16, true>,
       {},
       DType::float16},
      {"cast_check_bfloat16",
       "the same to bfloat16",
       Kind::element,
       &cast<DType::bfloat16, true>,
       {},
       DType::bfloat16},
      {"encode_int8", "float32 to int8, blocks of 256", Kind::codec, &run_encoder<CodecKind::int8>},
      {"encode_int8_random", "the same, rounded stochastically", Kind::codec,
       &run_encoder<CodecKind::int8, true>},
      {"encode_int4", "float32 to int4", Kind::codec, &run_encoder<CodecKind::int4>},
      {"encode_sign", "float32 to signs and means", Kind::codec, &run_encoder<CodecKind::sign>},
      {"encode_fp16", "float32 to float16 and an exponent", Kind::codec,
       &run_encoder<CodecKind::fp16>},
      {"decode_int8", "int8 to float32", Kind::codec, &run_decoder<CodecKind::int8>},
      {"decode_int8_sum", "the sum of eight codes", Kind::codec, &run_decoder<CodecKind::int8, 8>},
      {"decode_int4", "int4 to float32", Kind::codec, &run_decoder<CodecKind::int4>},
      {"reduce_many", "all_reduce of ranks that share a GPU, without their meetings",
       Kind::all_reduce, &reduce_many, any},
      {"one_shot_ll", "all_reduce by hand: flags in the data", Kind::check,
       &all_reduce<&cuda::all_reduce_one_shot_ll>, half},
      {"one_shot_kernel", "all_reduce by hand: all read all", Kind::all_reduce,
       &all_reduce<&cuda::all_reduce_one_shot>, half},
      {"two_shot_kernel", "all_reduce by hand: each sums a part", Kind::all_reduce,
       &all_reduce<&cuda::all_reduce_two_shot>, half},
      {"ring", "all_reduce by the Program", Kind::all_reduce, &program, any},
      {"tree", "all_reduce by the Program", Kind::all_reduce, &program, any},
      {"halving_doubling", "all_reduce by the Program", Kind::all_reduce, &program, any},
      {"recursive_doubling", "all_reduce by the Program", Kind::check, &program, any},
      {"one_shot", "all_reduce by the Program, over windows", Kind::check, &program, any},
      {"two_shot", "all_reduce by the Program, over windows", Kind::check, &program, any},
  };
  return all;
}

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"element", "all_reduce", "check", "codec"};
  return kNames[static_cast<int>(kind)];
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
  const size_t size = size_of(world.dtype());
  std::vector<std::byte> memory(world.count() * size);
  for (int rank = 0; rank < world.ranks(); ++rank) {
    for (uint64_t i = 0; i < world.count(); ++i) {
      encode(world.dtype(), value(rank, i, salt), memory.data() + i * size);
    }
    world.write(world.input(rank), memory.data(), memory.size());
    const std::vector<std::byte> other(memory.size(), std::byte{0x7f});
    world.write(world.output(rank), other.data(), other.size());
  }
}

float expected(const World& world, const Operation& operation, uint64_t i, int salt) {
  if (!operation.is_collective()) {
    return value(0, i, salt) * (operation.name == "copy" ? 1 : kScale);
  }
  float sum = 0;
  for (int rank = 0; rank < world.ranks(); ++rank) sum += value(rank, i, salt);
  return sum;
}

void check_outputs(World& world, const Operation& operation, int salt) {
  const DType type = operation.result.value_or(world.dtype());
  for (int rank = 0; rank < (operation.is_collective() ? world.ranks() : 1); ++rank) {
    const auto got = world.read(world.output(rank), world.count() * size_of(type));
    for (uint64_t i = 0; i < world.count(); ++i) {
      const float x = decode(type, got.data() + i * size_of(type));
      const float wanted = expected(world, operation, i, salt);
      if (x == wanted) continue;
      throw std::runtime_error(concat(operation.name, " of ", world.count(), " ",
                                      name_of(world.dtype()), ": rank ", rank, " has ", x, " at ",
                                      i, ", not ", wanted));
    }
  }
}

void check_found_inf(World& world, const Operation& operation) {
  const auto found = [&] {
    return decode(DType::float32, world.read(world.found_inf(), sizeof(float)).data());
  };
  if (found() != 0) throw std::runtime_error(operation.name + " found an inf that is not there");
  const float infinite = std::numeric_limits<float>::infinity();
  std::byte* const end = world.input(0) + world.count() * sizeof(infinite);
  world.write(end - sizeof(infinite), &infinite, sizeof(infinite));
  operation.launch(world, operation);
  world.synchronize();
  if (found() != 1) throw std::runtime_error(operation.name + " has not found the inf");
  world.clear_found_inf();
}

void check_call(World& world, const Operation& operation, int salt) {
  fill(world, salt);
  world.synchronize();
  operation.launch(world, operation);
  world.synchronize();
  check_outputs(world, operation, salt);
  if (operation.name.find("check") != std::string::npos) check_found_inf(world, operation);
}

// With two warps a block.
cuda::Geometry geometry_for_checks(int ranks) {
  cuda::Geometry geometry = tests::small_geometry(ranks);
  geometry.threads = 64;
  return geometry;
}

int check(int ranks, const std::vector<std::string>& names) {
  int done = 0;
  for (const std::string& name : names) {
    const Operation& operation = find(name);
    const cuda::Geometry geometry = geometry_for_checks(ranks);
    const uint64_t most = name == "one_shot_ll" ? cuda::one_shot_ll_limit(geometry) : UINT64_MAX;
    World world(ranks, geometry);
    std::vector<DType> types = operation.types;
    types.push_back(DType::float32);
    for (const DType type : types) {
      for (const uint64_t count : {1, 7, 64, 1000, 4099}) {
        if (count * size_of(type) > most) continue;
        world.resize(count, type);
        check_call(world, operation, done++);
      }
    }
  }
  std::printf("ok check: %d calls on %d ranks\n", done, ranks);
  return 0;
}

// ---- replay ----

int replay(int ranks, int replays) {
  for (const char* name : {"one_shot_kernel", "two_shot_kernel", "ring"}) {
    const Operation& operation = find(name);
    World world(ranks, geometry_for_checks(ranks));
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
      std::printf("%-20s %-10s %s\n", operation.name.c_str(), name_of(operation.kind),
                  operation.summary.c_str());
    }
    return 0;
  }
  if (what == "check" && arguments.size() >= 2) {
    std::vector<std::string> names(arguments.begin() + 2, arguments.end());
    if (names.empty()) {
      for (const Operation& operation : operations()) {
        if (operation.kind != Kind::codec) names.push_back(operation.name);
      }
    }
    return check(number(1), names);
  }
  if (what == "lists" && arguments.size() == 3) {
    check_lists(number(1), std::stoull(arguments[2]));
    std::printf("ok lists: %d cases\n", number(1));
    return 0;
  }
  if (what == "codecs" && arguments.size() == 2) {
    std::printf("ok codecs: %d calls\n", check_codecs(std::stoull(arguments[1])));
    return 0;
  }
  if (what == "replay" && arguments.size() == 3) return replay(number(1), number(2));
  if (what == "time" && arguments.size() >= 4) {
    return time(find(arguments[1]), number(2), std::stoull(arguments[3]),
                arguments.size() > 4 ? number(4) : 11);
  }
  std::fprintf(stderr,
               "usage: kernels --list | check RANKS [NAMES...] | codecs LONGEST |"
               " lists CASES SEED | replay RANKS REPLAYS | time NAME RANKS BYTES [ROUNDS]\n");
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
