// What makes a Program safe to run: every index in bounds, every space allowed. Whether it computes
// the right thing is check.cpp's business.
#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "core/error.h"
#include "program/program.h"

namespace pycoll {
namespace {

// More than any algorithm needs; bounds what an executor allocates for a Program.
constexpr int32_t kMaxChunks = 1 << 20;

constexpr uint8_t bit(Space space) {
  return static_cast<uint8_t>(1u << static_cast<uint8_t>(space));
}
constexpr uint8_t kInput = bit(Space::input);
constexpr uint8_t kOutput = bit(Space::output);
constexpr uint8_t kAcc = bit(Space::acc);
constexpr uint8_t kWindow = bit(Space::window);

struct Allowed {
  uint8_t src;
  uint8_t dst;
};

// In the order of StepKind. Nothing writes input; a message reduction never reads what is finished.
constexpr std::array<Allowed, static_cast<size_t>(StepKind::kCount)> kAllowed{{
    {kInput | kOutput | kAcc | kWindow, 0},                         // send
    {0, kAcc | kOutput | kWindow},                                  // recv
    {0, kAcc | kOutput | kWindow},                                  // recv_copy_send
    {0, 0},                                                         // recv_send
    {kInput | kAcc, kAcc | kOutput},                                // recv_reduce
    {kInput | kAcc, 0},                                             // recv_reduce_send
    {kInput | kAcc, kOutput},                                       // recv_reduce_copy_send
    {kInput | kOutput | kAcc | kWindow, kAcc | kOutput | kWindow},  // copy
    {kInput | kWindow, kAcc | kOutput | kWindow},                   // reduce_from
    {0, kOutput | kWindow},                                         // copy_from
    {kInput, kOutput},                                              // reduce_to
    {0, 0},                                                         // barrier
}};

// An end of a FIFO: (does this rank send?, peer, channel).
using FifoEnd = std::tuple<bool, int32_t, int32_t>;

class Validator {
 public:
  explicit Validator(const Program& program) : program_(program) {}

  void run() {
    header();
    for (const auto& group : program_.groups) members(group);
    for (lane_ = 0; lane_ < program_.lanes.size(); ++lane_) {
      const auto& steps = program_.lanes[lane_].steps;
      for (step_ = 0; step_ < steps.size(); ++step_) step(steps[step_]);
    }
  }

 private:
  template <typename... Parts>
  void require_program(bool good, const Parts&... parts) const {
    if (good) return;
    fail(ErrorKind::invalid_argument, "invalid Program, rank ", program_.rank, ": ", parts...);
  }

  template <typename... Parts>
  void require(bool good, const Parts&... parts) const {
    if (good) return;
    const Step& step = program_.lanes[lane_].steps[step_];
    const std::string place =
        step.kind < StepKind::kCount
            ? describe_step(program_, lane_, step_)
            : concat("rank ", program_.rank, ", lane ", lane_, ", step ", step_);
    fail(ErrorKind::invalid_argument, "invalid Program, ", place, ": ", parts...);
  }

  bool is_rank(int32_t rank) const { return rank >= 0 && rank < program_.world_size; }

  const CollectiveTraits& collective() const { return traits_of(program_.collective); }
  bool cuts_alike() const { return collective().lengths == Lengths::cut; }
  bool pairwise() const { return collective().lengths == Lengths::pairwise; }

  void header() const {
    const Program& p = program_;
    require_program(p.collective < Collective::kCount, "unknown collective");
    require_program(p.world_size >= 1, "world_size is ", p.world_size);
    require_program(is_rank(p.rank), "not a rank of ", p.world_size);
    require_program(is_rank(p.root), "root ", p.root, " is not a rank of ", p.world_size);
    require_program(p.input_chunks >= 1 && p.output_chunks >= 1 && most_chunks() <= kMaxChunks,
                    p.input_chunks, " input and ", p.output_chunks, " output chunks");
    require_program(p.channels >= 1 && p.channels <= kMaxChannels, p.channels, " channels");
    require_program(p.lanes.size() <= kMaxLanes, p.lanes.size(), " lanes, at most ", kMaxLanes);
    const int32_t w = p.world_size;
    const auto fits = [&](Parts parts, int32_t chunks) {
      return parts == Parts::alike ? p.input_chunks == p.output_chunks
                                   : chunks == (parts == Parts::one ? 1 : w);
    };
    const bool shape =
        fits(collective().input, p.input_chunks) && fits(collective().output, p.output_chunks);
    require_program(shape, name_of(p.collective), " with ", p.input_chunks, " input and ",
                    p.output_chunks, " output chunks on ", w, " ranks");
    require_program(p.acc_chunks >= 0 && p.acc_chunks <= most_chunks(), p.acc_chunks,
                    " acc chunks, but the vector has ", most_chunks());
    require_program(p.window_chunks >= 0 && p.window_chunks <= most_chunks(), p.window_chunks,
                    " window chunks, but the vector has ", most_chunks());
    require_program(p.needs_lease || !(p.lends_input || p.lends_output),
                    "it lends its vectors without a lease");
    require_program(!p.needs_lease || !pairwise(), name_of(p.collective),
                    " with leases: only two ranks know the length of a block");
    require_program(p.window_chunks == 0 || !pairwise(), name_of(p.collective),
                    " with a window: its ranks may run different numbers of rounds");
    std::vector<int32_t> ring = p.ring;
    std::sort(ring.begin(), ring.end());
    for (size_t place = 0; place < ring.size(); ++place) {
      require_program(
          ring.size() == static_cast<size_t>(w) && ring[place] == static_cast<int32_t>(place),
          "a ring that does not hold each of ", w, " ranks once");
    }
  }

  void members(const std::vector<int32_t>& group) const {
    require_program(std::all_of(group.begin(), group.end(), [&](int32_t r) { return is_rank(r); }),
                    "a group has a member that is no rank of ", program_.world_size);
    require_program(
        std::adjacent_find(group.begin(), group.end(), std::greater_equal<>()) == group.end(),
        "the members of a group must be sorted and unique");
    require_program(std::binary_search(group.begin(), group.end(), program_.rank),
                    "a group without this rank");
  }

  int32_t most_chunks() const { return std::max(program_.input_chunks, program_.output_chunks); }

  int32_t chunks_of(Space space) const {
    switch (space) {
      case Space::input:
        return program_.input_chunks;
      case Space::output:
        return program_.output_chunks;
      case Space::acc:
        return program_.acc_chunks;
      case Space::window:
        return program_.window_chunks;
      case Space::none:
        break;
    }
    return 0;
  }

  void reference(std::string_view name, Ref ref, uint8_t allowed) const {
    require(static_cast<uint8_t>(ref.space) <= static_cast<uint8_t>(Space::window) &&
                (bit(ref.space) & allowed) != 0,
            name, " may not be ", name_of(ref.space));
    require(ref.chunk >= 0 && ref.chunk < chunks_of(ref.space), name, " is chunk ", ref.chunk,
            " of only ", chunks_of(ref.space), " chunks");
  }

  void own_vector(Ref ref) const {
    const bool root = program_.rank == program_.root;
    require(root || ref.space != Space::input || !collective().input_at_root, "only the root of a ",
            name_of(program_.collective), " may read input");
    require(root || ref.space != Space::output || !collective().output_at_root,
            "only the root of a ", name_of(program_.collective), " has an output");
  }

  void fifo_end(bool sends, int32_t peer, int32_t channel) {
    require(is_rank(peer) && peer != program_.rank, "rank ", peer, " is no peer");
    require(channel >= 0 && channel < program_.channels, "channel ", channel, " of only ",
            program_.channels);
    const auto owner = owners_.emplace(FifoEnd{sends, peer, channel}, lane_).first;
    require(owner->second == lane_, "lane ", owner->second, " uses the same end of that FIFO");
  }

  void direct(const Step& step) const {
    require(!pairwise(), "the ranks of an ", name_of(program_.collective),
            " may run different numbers of rounds");
    if (step.kind == StepKind::copy_from) {
      require(is_rank(step.from) && step.from != program_.rank, "rank ", step.from, " is no peer");
    } else {
      require(step.group >= 0 && static_cast<size_t>(step.group) < program_.groups.size(),
              "no group ", step.group);
    }
    if (step.kind == StepKind::barrier) return;
    remote(step);
    require(!cuts_alike() || step.remote_chunk == step.dst.chunk, "reads chunk ", step.remote_chunk,
            " of a peer into chunk ", step.dst.chunk, ", which has another size");
  }

  // What is read at a peer, and written there.
  void remote(const Step& step) const {
    const bool of_input = step.remote == Space::input;
    require(of_input || step.remote == Space::window, "reads a peer's ", name_of(step.remote));
    require(of_input || step.kind != StepKind::reduce_to, "writes what the peers still show");
    require(step.remote_chunk >= 0 && step.remote_chunk < chunks_of(step.remote),
            name_of(step.remote), "[", step.remote_chunk, "] of only ", chunks_of(step.remote),
            " chunks");
    if (!of_input) return;
    require(program_.needs_lease, "reads a peer's input without a lease");
    require(!collective().input_at_root || step.from == program_.root, "only the root of a ",
            name_of(program_.collective), " has an input");
    const int32_t peer = step.kind == StepKind::copy_from ? step.from : program_.rank;
    require(remote_length_class(program_, step, peer) == length_class(program_, step),
            "reads a chunk of another size than its own");
    if (step.kind != StepKind::reduce_to) return;
    const auto& group = program_.groups[static_cast<size_t>(step.group)];
    require(step.to == -1 || std::binary_search(group.begin(), group.end(), step.to), "rank ",
            step.to, " is not in the group");
    require(!collective().output_at_root || step.to == program_.root, "only the root of a ",
            name_of(program_.collective), " has an output");
    require(collective().lengths == Lengths::cut, "ranks have different outputs");
  }

  // Accumulators and windows have room for any slice; the caller's vectors do not.
  void same_length(const Step& step) const {
    const auto in_vectors = [](Ref ref) {
      return ref.space == Space::input || ref.space == Space::output;
    };
    const bool both = in_vectors(step.src) && in_vectors(step.dst);
    if (!cuts_alike() && !both) return;
    require(length_class(program_, step.src) == length_class(program_, step.dst),
            to_string(step.src), " and ", to_string(step.dst), " have different sizes");
  }

  void step(const Step& step) {
    require(step.kind < StepKind::kCount, "unknown kind");
    const StepTraits& traits = traits_of(step.kind);
    const Allowed allowed = kAllowed[static_cast<size_t>(step.kind)];
    if (traits.reads) {
      reference("src", step.src, allowed.src);
      own_vector(step.src);
    }
    if (traits.stores) reference("dst", step.dst, allowed.dst);
    if (traits.stores && step.kind != StepKind::reduce_to) own_vector(step.dst);
    if (traits.reads && traits.stores) {
      same_length(step);
      require(step.kind != StepKind::copy || step.src != step.dst, "copies onto itself");
    }
    require(step.kind != StepKind::recv_send || length_classes(program_) == 1,
            "passes on a chunk of unknown length: only where all chunks have one");
    if (traits.receives) fifo_end(false, step.from, step.channel);
    if (traits.sends) fifo_end(true, step.to, step.channel);
    if (traits.receives && !traits.reduces) {
      require((step.dst.space == Space::acc) == (step.wire == Wire::partial), "a ",
              name_of(step.wire), " message cannot be stored in ", name_of(step.dst.space));
    }
    if (traits.direct) direct(step);
  }

  const Program& program_;
  size_t lane_ = 0;
  size_t step_ = 0;
  std::map<FifoEnd, size_t> owners_;
};

}  // namespace

void validate(const Program& program) {
  Validator(program).run();
}

}  // namespace pycoll
