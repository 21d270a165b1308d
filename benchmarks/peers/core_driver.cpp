// One rank of a job of pycoll's C++ core that measures on command (driver.h).
//
// Built from the headers of the source tree (csrc/) against the libpycoll.so of a build or of the
// installed package; both must be of one version. Environment: RANK, WORLD_SIZE.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "core/error.h"
#include "driver.h"
#include "runtime/communicator.h"
#include "transport/network.h"
#include "transport/shm/arena.h"

namespace {

using namespace pycoll;

// A file a key. A value appears at once and whole, because it is renamed into its place.
class DirectoryStore final : public Store {
 public:
  explicit DirectoryStore(std::filesystem::path directory) : directory_(std::move(directory)) {}

  void set(const std::string& key, const std::string& value) override {
    const auto target = path(key);
    const std::filesystem::path draft = target.string() + "." + std::to_string(::getpid());
    std::ofstream(draft, std::ios::binary) << value;
    std::filesystem::rename(draft, target);
  }
  std::optional<std::string> get(const std::string& key, Nanoseconds timeout) override {
    const Deadline deadline = Deadline::after(timeout);
    while (true) {
      if (std::ifstream file(path(key), std::ios::binary); file) {
        return std::string(std::istreambuf_iterator<char>(file), {});
      }
      if (deadline.passed()) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  std::optional<std::string> peek(const std::string& key) override { return get(key, {}); }
  void remove(const std::string& key) override { std::filesystem::remove(path(key)); }

 private:
  std::filesystem::path path(std::string key) const {
    for (char& c : key) c = c == '/' ? '_' : c;
    return directory_ / ("key." + key);
  }
  std::filesystem::path directory_;
};

struct CollectiveRow {
  const char* name;
  Collective collective;
  ReduceOp op;
};
constexpr CollectiveRow kCollectives[] = {
    {"all_reduce", Collective::all_reduce, ReduceOp::sum},
    {"all_gather", Collective::all_gather, ReduceOp::none},
    {"reduce_scatter", Collective::reduce_scatter, ReduceOp::sum},
    {"broadcast", Collective::broadcast, ReduceOp::none},
    {"all_to_all", Collective::all_to_all, ReduceOp::none},
    {"barrier", Collective::barrier, ReduceOp::none},
};

PlainCall::Vector vector_of(Parts parts, float* data, size_t elements, int world_size) {
  const uint32_t blocks = parts == Parts::world ? static_cast<uint32_t>(world_size) : 1;
  PlainCall::Vector vector;
  vector.data = reinterpret_cast<std::byte*>(data);
  vector.block_count = elements / blocks;
  vector.blocks = blocks;
  return vector;
}

void describe_vectors(const Communicator& group, const command& command, float* input,
                      float* output, PlainCall& call) {
  const CollectiveTraits& traits = traits_of(call.collective);
  const driver_shape shape = driver_shape_of(&command, group.world_size());
  call.dtype = DType::float32;
  if (!traits.input_at_root || group.rank() == 0) {
    call.input = vector_of(traits.input, input, shape.given, group.world_size());
  }
  call.output = vector_of(traits.output, output, shape.got, group.world_size());
}

int call(void* state, const command* command, float* input, float* output) {
  auto& group = *static_cast<Communicator*>(state);
  for (const CollectiveRow& row : kCollectives) {
    if (std::string_view(row.name) != command->collective) continue;
    PlainCall call;
    call.collective = row.collective;
    call.reduce_op = row.op;
    if (row.collective != Collective::barrier) {
      describe_vectors(group, *command, input, output, call);
    }
    group.run(call, nullptr);
    return 0;
  }
  return 1;
}

// From the arena that peers map: what is in it is reduced without staging copies.
void* allocate_shareable(void*, size_t bytes) {
  const auto arena = shm::process_arena();
  return arena == nullptr ? nullptr : arena->allocate(bytes);
}

int number_from(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) fail(ErrorKind::invalid_argument, variable, " is not set");
  return std::atoi(text);
}

void serve() {
  const char* directory = std::getenv("PEERS_DIRECTORY");
  DirectoryStore store(directory == nullptr ? "." : directory);
  NetworkRegistry networks;
  BootstrapRequest request;
  request.store = &store;
  request.prefix = "benchmark";
  request.rank = number_from("RANK");
  request.world_size = number_from("WORLD_SIZE");
  request.config = Config::from_env();
  const auto group = Communicator::make(
      request, networks.network_for(request.prefix, request.config), std::chrono::minutes(5));
  const library library{"pycoll",    group->rank(), group->world_size(),
                        group.get(), call,          allocate_shareable};
  driver_serve(&library);
  group->close();
}

}  // namespace

int main() {
  try {
    serve();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "core_driver: %s\n", error.what());
    return 1;
  }
}
