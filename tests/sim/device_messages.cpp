// Send and recv: batches of messages that the two sides may group differently, beside collectives.
#include "device_scenarios.h"

namespace pycoll::sim::tests {
namespace {

using stress::Rng;

struct Message {
  int32_t from;
  int32_t to;
  std::shared_ptr<Buffer> source;
  std::shared_ptr<Buffer> target;
  Bytes contents;
};

Message draw_message(Rng& rng, int32_t world_size) {
  Message message;
  const auto world = static_cast<uint64_t>(world_size);
  message.from = static_cast<int32_t>(rng.below(world));
  message.to = static_cast<int32_t>(
      (static_cast<uint64_t>(message.from) + 1 + rng.below(world - 1)) % world);
  const uint64_t bytes = size_of_case(rng.next() >> 8);
  message.contents =
      make_contents(DType::uint8, ReduceOp::none, bytes, rng.next() >> 8, Contents::any);
  message.source = std::make_shared<Buffer>(bytes, rng.below(17));
  message.target = std::make_shared<Buffer>(bytes, rng.below(17));
  message.source->fill(message.contents);
  return message;
}

// One kernel for the given messages of a rank.
void launch_batch(DeviceGroup& group, int32_t rank, const std::vector<const Message*>& messages,
                  Keep& keep) {
  std::vector<cuda::MessageStep> steps;
  cuda::ProgramCall call;
  call.call = {77, 1, 0};
  call.arithmetic.dtype = DType::uint8;
  for (const Message* message : messages) {
    const bool sends = message->from == rank;
    const Buffer& buffer = sends ? *message->source : *message->target;
    cuda::Vector& vector = sends ? call.input : call.output;
    vector.block[vector.blocks] = buffer.data();
    vector.count[vector.blocks++] = buffer.size();
    steps.push_back({sends, sends ? message->to : message->from});
  }
  const auto image = std::make_shared<cuda::ProgramImage>(cuda::compile_messages(steps));
  keep.push_back(image);
  call.image = image.get();
  call.steps = image->steps.data();
  check(cuda::run_program(group.view(rank), call, group.stream(rank)) == cudaSuccess,
        "launch of messages");
}

// Messages happen one batch of the whole group after the other; inside it, a rank may split its
// part at any place if it only sends or only receives there (else kernels on one stream could wait
// for each other, as ungrouped sends and receives do anywhere).
uint64_t run_group(const Settings& settings, Rng& rng, int32_t world_size) {
  cuda::Geometry geometry = small_geometry(world_size);
  geometry.threads = rng.one_in(2) ? 8 : 32;
  DeviceGroup group(geometry, settings.options(), rng.one_in(2) ? 0u - 4u : 0u);
  Keep keep;
  std::vector<Message> all;
  constexpr int kBatches = 4;
  const int messages = rng.one_in(4) ? 24 : 6;
  all.reserve(static_cast<size_t>(kBatches * messages));
  std::vector<std::unique_ptr<CallData>> collectives;
  for (int batch = 0; batch < kBatches; ++batch) {
    const size_t first = all.size();
    for (int i = 0; i < messages; ++i) all.push_back(draw_message(rng, world_size));
    for (int32_t rank = 0; rank < world_size; ++rank) {
      std::vector<const Message*> mine;
      bool sends = false, receives = false;
      for (size_t i = first; i < all.size(); ++i) {
        if (all[i].from != rank && all[i].to != rank) continue;
        (all[i].from == rank ? sends : receives) = true;
        mine.push_back(&all[i]);
      }
      if (sends != receives && mine.size() > 1) {
        const auto middle = mine.begin() + static_cast<ptrdiff_t>(rng.below(mine.size()));
        launch_batch(group, rank, {mine.begin(), middle}, keep);
        launch_batch(group, rank, {middle, mine.end()}, keep);
      } else {
        launch_batch(group, rank, mine, keep);
      }
    }
    CallShape shape;
    shape.count = rng.below(300);
    shape.seed = rng.next() >> 8;
    collectives.push_back(std::make_unique<CallData>(shape, world_size));
    launch_program(group, *collectives.back(), "ring", keep, static_cast<uint32_t>(batch));
  }
  group.run();
  for (const auto& call : collectives) call->check("all_reduce between messages");
  for (const Message& message : all) {
    const std::string differs =
        difference(DType::uint8, message.target->contents(), message.contents);
    check(differs.empty(), "message of " + std::to_string(message.contents.size()) +
                               " bytes from " + std::to_string(message.from) + " to " +
                               std::to_string(message.to) + ": " + differs);
  }
  return all.size();
}

}  // namespace

uint64_t message_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 107 + 13);
  uint64_t done = 0;
  while (done < cases) done += run_group(settings, rng, 2 + static_cast<int32_t>(rng.below(3)));
  return done;
}

}  // namespace pycoll::sim::tests
