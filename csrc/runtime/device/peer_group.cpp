#include "runtime/device/peer_group.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <new>

#include "core/error.h"
#include "program/algorithm.h"
#include "transport/call.h"

namespace pycoll::cuda {
namespace {

// Of all slots of a region.
constexpr uint64_t kSlotsBytes = 64 << 20;

// All ranks must come to the same: where they do not know each other's lengths there is one rule.
uint64_t bytes_to_choose_by(const CallRequest& request) {
  return std::max(request.input.count(), request.output.count()) * size_of(request.dtype);
}

std::optional<std::string> chosen_by_caller(const CallRequest& request) {
  if (request.algorithm.empty() || request.algorithm == "auto") return std::nullopt;
  return request.algorithm;
}

uint32_t mix(uint32_t hash, uint64_t word) {
  for (int byte = 0; byte < 8; ++byte) {
    hash = (hash ^ static_cast<uint32_t>(word >> (8 * byte) & 0xff)) * 16777619u;  // FNV-1a
  }
  return hash;
}

// Of all that every rank knows of a call.
uint32_t fingerprint_of(const CallRequest& request, uint64_t sequence) {
  const CollectiveTraits& traits = traits_of(request.collective);
  uint32_t hash = mix(2166136261u, sequence);
  hash = mix(hash, static_cast<uint64_t>(request.collective));
  hash = mix(hash, static_cast<uint64_t>(request.dtype));
  hash = mix(hash, static_cast<uint64_t>(request.reduce_op));
  hash = mix(hash, static_cast<uint64_t>(request.root));
  if (request.over.codec != 0) {
    hash = mix(hash, request.over.codec | static_cast<uint64_t>(request.over.layout) << 32);
    hash = mix(hash, static_cast<uint32_t>(request.over.call));
  }
  switch (traits.lengths) {
    case Lengths::cut:
      return mix(hash, (traits.output_at_root ? request.input : request.output).count());
    case Lengths::equal: {
      const VectorView& every = traits.output_at_root ? request.input : request.output;
      return mix(hash, every.blocks.empty() ? 0 : every.blocks[0].count);
    }
    case Lengths::known: {
      const VectorView& all = traits.input == Parts::world ? request.input : request.output;
      for (const Block& block : all.blocks) hash = mix(hash, block.count);
      return hash;
    }
    case Lengths::pairwise:
      break;
  }
  return hash;
}

Vector vector_of(const VectorView& view) {
  Vector vector;
  for (const Block& block : view.blocks) {
    vector.block[vector.blocks] = block.data;
    vector.count[vector.blocks++] = block.count;
  }
  return vector;
}

// Relaxed and acquire: pairs with the kernel's release store of `trouble`.
uint32_t load_word(uint32_t& word, std::memory_order order) {
  return std::atomic_ref(word).load(order);
}

ErrorKind kind_of(Trouble trouble) {
  switch (trouble) {
    case Trouble::timed_out:
      return ErrorKind::timed_out;
    case Trouble::mismatch:
      return ErrorKind::mismatch;
    default:
      return ErrorKind::aborted;
  }
}

// What is reported of a call: its collective and, of codes, that of the call that they stand for.
uint32_t names_of(const CallRequest& request) {
  const auto carries = static_cast<uint32_t>(request.collective);
  if (request.over.codec == 0) return carries;
  return carries | ((static_cast<uint32_t>(request.over.call) & 0xff) + 1) << 8;  // pack_call()
}

std::string describe(uint32_t names) {
  const auto collective = static_cast<Collective>(names & 0xff);
  if (collective >= Collective::kCount) return "messages";
  if (names >> 8 == 0) return std::string(name_of(collective));
  const auto asked = static_cast<Collective>((names >> 8) - 1);
  return concat(name_of(asked), " over codes, as ", name_of(collective));
}

const char* words_for(Trouble trouble) {
  switch (trouble) {
    case Trouble::timed_out:
      return "did not come in time";
    case Trouble::mismatch:
      return "is in another call (other collective, type, operation, root, length or codec)";
    default:
      return "was waited for when the group was given up";
  }
}

}  // namespace

std::optional<Geometry> geometry_of(const Peers& peers, const Config& config) {
  Geometry geometry;
  geometry.world_size = peers.world_size();
  const auto world = static_cast<uint64_t>(geometry.world_size);
  const int room = peers.least_multiprocessors();
  for (geometry.message_fifos = 2; geometry.message_fifos > 0; --geometry.message_fifos) {
    const int left = room - grid_limits(geometry).messages;
    geometry.fifos = std::min(16, left / kMaxLanes / kMaxChannels * kMaxChannels);
    geometry.blocks = std::min(64, left);
    if (geometry.fifos >= kMaxChannels) break;
  }
  geometry.depth = static_cast<int32_t>(std::bit_ceil(std::max<uint64_t>(config.fifo_depth, 2)));
  const auto fifos = static_cast<uint64_t>(std::max(1, geometry.all_fifos()));
  const uint64_t most = kSlotsBytes / (world * fifos * static_cast<uint64_t>(geometry.depth));
  const auto in_lines = [](uint64_t bytes, uint64_t least) {
    return static_cast<uint32_t>(std::max(bytes / 64 * 64, least));
  };
  geometry.slot_bytes = in_lines(std::min(config.slot_bytes, most), 64);
  geometry.window_bytes = in_lines(config.window_bytes / 4, 64 * kMaxRanks);
  if (why_unusable(geometry) != nullptr) return std::nullopt;
  return geometry;
}

PeerGroup::PeerGroup(GroupSeed seed, const Geometry& geometry)
    : CudaGroup(std::move(seed)), host_(sizeof(HostWords)) {
  view_.rank = rank();
  view_.geometry = geometry;
  view_.layout = RegionLayout(geometry);
  view_.host = new (host_.data()) HostWords{};
}

void PeerGroup::connect() {
  make_regions(driver_, view_.layout.bytes);
  for (int peer = 0; peer < world_size(); ++peer) view_.region[peer] = payload_of(peer);
}

Call PeerGroup::call_of(uint32_t collective, uint32_t fingerprint,
                        const std::optional<Nanoseconds>& timeout) const {
  Call call;
  call.fingerprint = fingerprint;
  call.sequence = static_cast<uint32_t>(sequence());
  call.collective = collective;
  if (timeout) call.timeout_ns = static_cast<uint64_t>(timeout->count());
  return call;
}

PeerGroup::Loaded PeerGroup::load(ProgramImage image) const {
  const RelaxedCapture relaxed;
  const size_t bytes = image.steps.size() * sizeof(ProgramStep);
  Loaded loaded{std::move(image), DeviceMemory(std::max(bytes, sizeof(ProgramStep)))};
  if (bytes == 0) return loaded;
  const Stream stream;
  require(cudaMemcpyAsync(loaded.steps.data(), loaded.image.steps.data(), bytes, cudaMemcpyDefault,
                          stream.get()),
          "cudaMemcpyAsync");
  require(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  return loaded;
}

PeerChoice PeerGroup::choose(const CallRequest& request) const {
  PeerCall call;
  call.collective = request.collective;
  call.bytes = bytes_to_choose_by(request);
  call.fast = request.collective == Collective::all_reduce &&
              has_fast_all_reduce(request.dtype, request.reduce_op);
  call.determinism = control().config().determinism;
  return choose_for_peers(call, view_.geometry);
}

const PeerGroup::Loaded& PeerGroup::program_for(const CallRequest& request,
                                                const std::string& algorithm) {
  const ProgramKey key(request.collective, algorithm, request.root);
  const auto known = programs_.find(key);
  if (known != programs_.end()) return known->second;
  ProgramRequest wanted{request.collective, rank(), world_size(), request.root, {}};
  return programs_.emplace(key, load(compile(build_program(algorithm, wanted)))).first->second;
}

const PeerGroup::Loaded& PeerGroup::program_for(const std::vector<MessageRequest>& batch) {
  BatchKey key;
  std::vector<MessageStep> steps;
  for (const MessageRequest& message : batch) {
    key.emplace_back(!message.receives, message.peer);
    steps.push_back({!message.receives, message.peer});
  }
  const auto known = batches_.find(key);
  if (known != batches_.end()) return known->second;
  return batches_.emplace(std::move(key), load(compile_messages(steps))).first->second;
}

Vector PeerGroup::scaled(const CallRequest& request, const Vector& input, cudaStream_t stream) {
  const size_t element = size_of(request.dtype);
  constexpr size_t kAlign = 64;
  const auto padded = [&](uint64_t count) {
    return (count * element + kAlign - 1) / kAlign * kAlign;
  };
  size_t bytes = 0;
  for (int32_t i = 0; i < input.blocks; ++i) bytes += padded(input.count[i]);
  if (scaled_.empty() || scaled_.back().size() < bytes) {
    const RelaxedCapture relaxed;
    scaled_.emplace_back(std::bit_ceil(std::max<size_t>(bytes, kAlign)));
  }
  Vector result = input;
  std::byte* at = scaled_.back().data();
  for (int32_t i = 0; i < input.blocks; ++i) {
    result.block[i] = at;
    at += padded(input.count[i]);
    require(scale({.dtype = request.dtype,
                   .input = input.block[i],
                   .output = result.block[i],
                   .count = input.count[i],
                   .factor = request.premul_factor},
                  stream),
            "scaling the input of premul_sum");
  }
  return result;
}

void PeerGroup::launch_fast(const CallRequest& request, const Call& call, const Vector& input,
                            const PeerChoice& choice, cudaStream_t stream) const {
  AllReduceCall fast;
  fast.call = call;
  fast.arithmetic = {request.dtype, request.reduce_op, world_size()};
  fast.input = input.block[0];
  fast.output = request.output.blocks[0].data;
  fast.count = input.count[0];
  require(choice.fast(view_, fast, stream),
          concat("launching all_reduce (", choice.algorithm, ")"));
}

void PeerGroup::launch(const CallRequest& request, cudaStream_t stream) {
  const Call call =
      call_of(names_of(request), fingerprint_of(request, sequence()), request.timeout);
  // Before anything is on the stream: it may refuse.
  Vector input = vector_of(request.input);
  if (request.reduce_op == ReduceOp::premul_sum) input = scaled(request, input, stream);
  std::optional<std::string> algorithm = chosen_by_caller(request);
  if (!algorithm) {
    const PeerChoice choice = choose(request);
    if (choice.fast != nullptr) return launch_fast(request, call, input, choice, stream);
    algorithm = choice.algorithm;
  }
  const Loaded& loaded = program_for(request, *algorithm);
  ProgramCall program;
  program.call = call;
  const ReduceOp op = reduces(request.collective) ? request.reduce_op : ReduceOp::none;
  program.arithmetic = {request.dtype, op, world_size()};
  program.input = input;
  program.output = vector_of(request.output);
  program.image = &loaded.image;
  program.steps = reinterpret_cast<const ProgramStep*>(loaded.steps.data());
  require(run_program(view_, program, stream), concat("launching ", name_of(request.collective)));
}

void PeerGroup::launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) {
  if (batch.empty()) return;
  const Loaded& loaded = program_for(batch);
  ProgramCall program;
  // Only the two ranks of a message know of it: the kernel adds its length.
  program.call = call_of(static_cast<uint32_t>(Collective::kCount), 1, batch.front().timeout);
  program.arithmetic = {DType::uint8, ReduceOp::none, world_size()};
  for (const MessageRequest& message : batch) {
    Vector& side = message.receives ? program.output : program.input;
    side.block[side.blocks] = message.block.data;
    side.count[side.blocks++] = message.block.count * size_of(message.dtype);
  }
  program.image = &loaded.image;
  program.steps = reinterpret_cast<const ProgramStep*>(loaded.steps.data());
  require(run_program(view_, program, stream), "launching messages");
}

std::optional<Error> PeerGroup::reported() {
  ErrorRecord& record = view_.host->error;
  const auto trouble = static_cast<Trouble>(load_word(record.trouble, std::memory_order_acquire));
  if (trouble == Trouble::none) return std::nullopt;
  const auto read = [](uint32_t& word) { return load_word(word, std::memory_order_relaxed); };
  const uint32_t names = read(record.collective);
  // A rank without the codec may wait in a kernel that this one does not meet.
  const bool unlike = trouble == Trouble::timed_out && names >> 8 != 0;
  return Error(
      kind_of(trouble),
      concat("rank ", rank(), ": in ", describe(names), " #", read(record.sequence),
             " on the GPU, rank ", read(record.peer), " ", words_for(trouble),
             unlike ? "; every rank must give the call a codec, or be in the same region" : ""));
}

void PeerGroup::release_waits() {
  // Relaxed: kernels only ask whether it is 0.
  std::atomic_ref(view_.host->abort).store(1, std::memory_order_relaxed);
}

}  // namespace pycoll::cuda
