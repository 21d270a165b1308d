#include "simulator/simulate.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "kernels/reduce.h"
#include "program/algorithm.h"
#include "runtime/executor.h"
#include "runtime/slices.h"
#include "simulator/engine.h"
#include "simulator/symmetry.h"
#include "simulator/system.h"

namespace pycoll::simulator {
namespace {

// Symmetry is checked on every rank up to so many steps, above on hosts that are spread out.
constexpr uint64_t kComparedSteps = 4'000'000;
constexpr int32_t kFewestCompared = 4;

class Simulation {
 public:
  Simulation(const SimulationRequest& request, const std::function<void()>& tick)
      : request_(request), tick_(tick) {
    row_ = find_algorithm(request.collective, request.algorithm);
    check();
    place_ranks();
    element_ = size_of(request.dtype);
    if (reduces(request.collective)) {
      kernels_ = find_reduce_kernels(request.dtype, ReduceOp::sum, Isa::baseline);
      if (kernels_ == nullptr) {
        fail(ErrorKind::invalid_argument, why_not_reducible(request.dtype, ReduceOp::sum));
      }
    }
    first_ = build(0);
    lay_out();
  }

  SimulationResult run() {
    const uint64_t steps = estimate_steps();
    Symmetry symmetry(SymmetryKind::none, request_.ranks, per_host_);
    int32_t compared = 0;
    if (request_.use_symmetry && steps * rounds_ >= request_.symmetry_from) {
      if (const auto found = find_symmetry(compared)) symmetry = *found;
    }
    const uint64_t held = static_cast<uint64_t>(flights_) * steps /
                          static_cast<uint64_t>(request_.ranks) *
                          static_cast<uint64_t>(symmetry.simulated());
    if (held > request_.most_steps) refuse_steps(held);
    const System system = compile(symmetry);
    tick_();
    EngineResult run = Engine(system, request_.machine, request_.geometry.fifo_depth).run(tick_);
    const double copies = static_cast<double>(request_.ranks) / symmetry.simulated();
    SimulationResult result;
    result.seconds = *std::max_element(run.finished.begin(), run.finished.end());
    result.finished = std::move(run.finished);
    result.rounds = system.rounds;
    result.steps = run.steps;
    result.events = run.events;
    result.simulated_ranks = symmetry.simulated();
    result.compared_hosts = compared;
    result.network_bytes = run.network_bytes * copies;
    result.network_messages =
        static_cast<uint64_t>(static_cast<double>(run.network_messages) * copies);
    return result;
  }

 private:
  void check() const {
    const SimulationRequest& r = request_;
    if (r.machine.ranks_per_host < 0) {
      fail(ErrorKind::invalid_argument, "ranks_per_host is ", r.machine.ranks_per_host);
    }
    if (r.geometry.fifo_depth < 1) {
      fail(ErrorKind::invalid_argument, "FIFOs of no slots");
    }
    const bool several = r.machine.ranks_per_host > 0 && r.ranks > r.machine.ranks_per_host;
    if (row_ != nullptr && row_->needs_window && several) {
      fail(ErrorKind::invalid_argument, r.algorithm,
           " reads peers' memory: all ranks must be on one host");
    }
  }

  void place_ranks() {
    const int32_t per_host = request_.machine.ranks_per_host;
    per_host_ = per_host == 0 ? std::max(1, request_.ranks) : per_host;
    hosts_.resize(static_cast<size_t>(std::max(0, request_.ranks)));
    for (size_t rank = 0; rank < hosts_.size(); ++rank) {
      hosts_[rank] = static_cast<int32_t>(rank) / per_host_;
    }
    program_request_ = {request_.collective, 0, request_.ranks, request_.root, hosts_};
  }

  Program build(int32_t rank) {
    program_request_.rank = rank;
    return build_program(request_.algorithm, program_request_);
  }

  // Vectors without memory: only their lengths count.
  VectorView view_of(Parts parts) const {
    const uint64_t count = (request_.bytes + element_ - 1) / element_;
    if (parts == Parts::alike) return {{{nullptr, count}}};
    const auto world = static_cast<uint64_t>(request_.ranks);
    const uint64_t block = (count + world - 1) / world;
    return {std::vector<Block>(parts == Parts::one ? 1 : world, Block{nullptr, block})};
  }

  void lay_out() {
    const CollectiveTraits& traits = traits_of(request_.collective);
    input_ = view_of(traits.input);
    output_ = view_of(traits.output);
    slice_ = slice_elements(first_, kernels_, element_, request_.geometry);
    rounds_ = round_count(ChunkCutter(first_, input_, output_, element_).largest_chunk(), slice_);
    // As the executor has it: several rounds only where there are no windows.
    const auto most = static_cast<uint64_t>(kMaxChannels / first_.channels);
    flights_ = request_.ranks > per_host_ ? static_cast<int32_t>(std::min(most, rounds_)) : 1;
    call_.element_bytes = static_cast<uint32_t>(element_);
    call_.acc_bytes =
        static_cast<uint32_t>(kernels_ == nullptr ? element_ : size_of(kernels_->acc));
    const uint64_t in = input_.count();
    const uint64_t out = output_.count();
    const double held = static_cast<double>((request_.in_place ? std::max(in, out) : in + out));
    call_.vector_bytes = held * static_cast<double>(element_) * std::min(per_host_, request_.ranks);
  }

  uint64_t length_of(const Program& program, const Step& step) const {
    return ChunkCutter(program, input_, output_, element_).range_of(step).size();
  }

  static uint64_t steps_of(const Program& program) {
    uint64_t steps = 0;
    for (const Lane& lane : program.lanes) steps += lane.steps.size();
    return steps;
  }

  // Of all ranks, from the root's and some others' Programs.
  uint64_t estimate_steps() {
    constexpr int32_t kSamples = 8;
    const int32_t ranks = request_.ranks;
    uint64_t sum = 0;
    int32_t looked = 0;
    for (int32_t i = 0; i < kSamples && i < ranks; ++i) {
      const auto rank = static_cast<int32_t>(int64_t{ranks} * i / kSamples + (i > 0 ? i % 2 : 0));
      if (rank == request_.root || rank >= ranks) continue;
      sum += steps_of(build(rank));
      ++looked;
    }
    const uint64_t others = looked == 0 ? 0 : sum * static_cast<uint64_t>(ranks - 1) / looked;
    return others + steps_of(build(request_.root));
  }

  [[noreturn]] void refuse_steps(uint64_t steps) const {
    const uint64_t each = steps / static_cast<uint64_t>(request_.ranks);
    fail(ErrorKind::invalid_argument, request_.algorithm, " on ", request_.ranks, " ranks has ",
         steps, " steps, about ", each, " a rank; at most ", request_.most_steps, " are simulated",
         request_.use_symmetry ? ", and its ranks are not alike" : "");
  }

  std::optional<Symmetry> find_symmetry(int32_t& compared) {
    for (const SymmetryKind kind : {SymmetryKind::rotation, SymmetryKind::exclusive_or}) {
      if (!Symmetry::possible(kind, request_.ranks, per_host_)) continue;
      const Symmetry symmetry(kind, request_.ranks, per_host_);
      compared = 0;
      if (holds(symmetry, compared)) return symmetry;
    }
    compared = 0;
    return std::nullopt;
  }

  // Permutations that are compared: all of them, or powers of two and some between.
  std::vector<int32_t> permutations(const Symmetry& symmetry) const {
    const auto all = static_cast<int32_t>(kComparedSteps /
                                          (steps_of(first_) * static_cast<uint64_t>(per_host_)));
    const int32_t count = std::min(symmetry.hosts(), std::max(all, kFewestCompared));
    std::vector<int32_t> chosen;
    for (int32_t power = 1; power < symmetry.hosts(); power *= 2) chosen.push_back(power);
    for (int32_t i = 1; i < count; ++i) {
      chosen.push_back(static_cast<int32_t>(int64_t{symmetry.hosts()} * i / count));
    }
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
    return chosen;
  }

  bool holds(const Symmetry& symmetry, int32_t& compared) {
    const std::vector<int32_t> chosen = permutations(symmetry);
    for (int32_t rank = 0; rank < per_host_; ++rank) {
      const Program mine = build(rank);
      for (const int32_t g : chosen) {
        tick_();
        if (!corresponds(mine, build(symmetry.moved(rank, g)), symmetry, g)) return false;
      }
    }
    compared = static_cast<int32_t>(chosen.size());
    return true;
  }

  bool corresponds(const Program& mine, const Program& other, const Symmetry& symmetry,
                   int32_t g) const {
    if (mine.lanes.size() != other.lanes.size() || !mine.groups.empty()) return false;
    const auto peer = [&](int32_t rank) { return rank < 0 ? rank : symmetry.moved(rank, g); };
    for (size_t lane = 0; lane < mine.lanes.size(); ++lane) {
      const auto& a = mine.lanes[lane].steps;
      const auto& b = other.lanes[lane].steps;
      if (a.size() != b.size()) return false;
      for (size_t i = 0; i < a.size(); ++i) {
        const bool same = a[i].kind == b[i].kind && a[i].src.space == b[i].src.space &&
                          a[i].dst.space == b[i].dst.space && a[i].wire == b[i].wire &&
                          a[i].channel == b[i].channel && peer(a[i].from) == b[i].from &&
                          peer(a[i].to) == b[i].to &&
                          length_of(mine, a[i]) == length_of(other, b[i]);
        if (!same) return false;
      }
    }
    return true;
  }

  System compile(const Symmetry& symmetry) {
    Compiler compiler(request_.machine, call_, symmetry, hosts_, flights_);
    for (int32_t rank = 0; rank < symmetry.simulated(); ++rank) {
      if (rank % 256 == 0) tick_();
      const Program program = build(rank);
      compiler.add(program, [&](const Step& step) { return length_of(program, step); });
    }
    return compiler.finish(slice_, rounds_);
  }

  const SimulationRequest& request_;
  const std::function<void()>& tick_;
  const Algorithm* row_ = nullptr;
  const ReduceKernels* kernels_ = nullptr;
  int32_t per_host_ = 1;
  std::vector<int32_t> hosts_;
  ProgramRequest program_request_;
  Program first_;
  VectorView input_;
  VectorView output_;
  size_t element_ = 4;
  uint64_t slice_ = 1;
  uint64_t rounds_ = 1;
  int32_t flights_ = 1;
  CallShape call_;
};

}  // namespace

SimulationResult simulate(const SimulationRequest& request, const std::function<void()>& tick) {
  return Simulation(request, tick).run();
}

}  // namespace pycoll::simulator
