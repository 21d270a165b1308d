"""Bugs put into the device kernels on purpose, each with the check that must find it.

A mutant is one substitution: `find` stands exactly once in `file`. `check` is a suite of
tests/sim/device_kernels.cpp (or of `program`), `build` what it is compiled with; `signs` are what
its output may show.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    find: str
    replace: str
    breaks: str
    check: str
    build: str = "thread"
    signs: tuple[str, ...] = ("data race",)
    program: str = "device_kernels"


KERNELS = "csrc/kernels/cuda/"
ALL_REDUCE = KERNELS + "all_reduce.cuh"
EXECUTOR = KERNELS + "executor.cuh"
WAITING = KERNELS + "waiting.cuh"
SHARED = KERNELS + "shared_device.cuh"
FUSED = KERNELS + "fused.cuh"
CODEC = KERNELS + "codec.cuh"
CODEC_TEAM = KERNELS + "codec_team.cuh"
CODEC_UNITS = KERNELS + "codec_units.cuh"
WRONG = ("FAILED",)
CREDIT = "credit_of(group_, step.from, group_.rank, fifo),"
SYNC = "    __syncthreads();\n"

MUTANTS = [
    Mutant(
        "window_not_alternated",
        ALL_REDUCE,
        "    rounds.next();\n    at += n;\n",
        "    at += n;\n",
        "a window is written while peers still read it",
        "all_reduce",
    ),
    Mutant(
        "two_shot_no_second_barrier",
        ALL_REDUCE,
        "    if (!rounds.meet(1)) return;\n",
        "",
        "sums are read before they are there",
        "all_reduce",
    ),
    Mutant(
        "counters_on_the_host",
        ALL_REDUCE,
        "    *counter_of_block(in_.group, in_.group.layout.barriers) = barriers_;\n",
        "",
        "the next kernel, or a replay of this one, begins with the counters of this one",
        "all_reduce",
        "",
        (*WRONG, "simt:"),
    ),
    Mutant(
        "credit_relaxed",
        EXECUTOR,
        "device::store_release<Scope::system>(" + CREDIT,
        "device::store_relaxed<Scope::system>(" + CREDIT,
        "a slot may be written before it was read",
        "programs",
    ),
    Mutant(
        "credit_of_device_scope",
        EXECUTOR,
        "device::store_release<Scope::system>(" + CREDIT,
        "device::store_release<Scope::device>(" + CREDIT,
        "the peer, on another device, is not ordered after it",
        "programs",
    ),
    Mutant(
        "message_relaxed",
        EXECUTOR,
        "      device::store_release<Scope::system>(out.flag,",
        "      device::store_relaxed<Scope::system>(out.flag,",
        "the flag may be seen before the message",
        "programs",
    ),
    Mutant(
        "no_credit_wait",
        EXECUTOR,
        "    if (sends && threadIdx.x == blockDim.x - 1) await_slot(step, index, fifo, *sent);\n",
        "",
        "slots are written while the peer may read them",
        "programs",
        "",
        (*WRONG, "simt:"),
    ),
    Mutant(
        "no_sync_after_waiting",
        EXECUTOR,
        SYNC + "    if (block_failed(state_)) return false;\n",
        "    if (block_failed(state_)) return false;\n",
        "threads go on before the message is there",
        "programs",
        "thread",
        ("data race", *WRONG),
    ),
    Mutant(
        "no_sync_before_releasing",
        EXECUTOR,
        SYNC + "\n    if (receives && threadIdx.x == 0) {\n      ++*received;",
        "\n    if (receives && threadIdx.x == 0) {\n      ++*received;",
        "a slot is given back while threads of the block still read it",
        "programs",
    ),
    Mutant(
        "no_sync_after_copy",
        EXECUTOR,
        "    __syncthreads();  // the next step may give other threads the same elements\n",
        "",
        "a thread reads what another one has not copied yet",
        "programs",
    ),
    Mutant(
        "tail_off_by_one",
        KERNELS + "float_sum.cuh",
        "    for_each<1>(team, count - done, [&](auto, uint64_t first, uint64_t) {\n"
        "      const uint64_t i = done + first;\n      float total = 0;\n",
        "    for_each<1>(team, count - done + 1, [&](auto, uint64_t first, uint64_t) {\n"
        "      const uint64_t i = done + first;\n      float total = 0;\n",
        "an element beyond the end is read and written",
        "all_reduce",
        "address",
        ("AddressSanitizer",),
    ),
    Mutant(
        "misaligned_packs",
        KERNELS + "loops.cuh",
        "low_bits(copy.src) | low_bits(copy.dst) | low_bits(copy.also)",
        "low_bits(copy.src) | low_bits(copy.also)",
        "sixteen bytes are stored at an address that is no multiple of 16",
        "all_reduce",
        "",
        ("simt:",),
    ),
    Mutant(
        "early_return",
        ALL_REDUCE,
        "  const bool has_peer = peer < world && peer != group.rank;\n",
        "  const bool has_peer = peer < world && peer != group.rank;\n"
        "  if (threadIdx.x >= words && !has_peer) return;\n",
        "threads leave before the barriers of their block",
        "all_reduce",
        "",
        ("simt:",),
    ),
    Mutant(
        "wait_relaxed",
        WAITING,
        "[&] { return device::load_acquire<Scope::system>(flag); }",
        "[&] { return device::load_relaxed<Scope::system>(flag); }",
        "what the flag says is there may not be seen",
        "programs",
    ),
    Mutant(
        "arrival_relaxed",
        WAITING,
        "    device::store_release<Scope::system>(arrival_of(",
        "    device::store_relaxed<Scope::system>(arrival_of(",
        "a barrier may be seen before what came before it",
        "all_reduce",
    ),
    Mutant(
        "no_sync_before_arrival",
        WAITING,
        "  const uint32_t mine = ++*number;\n  __syncthreads();\n",
        "  const uint32_t mine = ++*number;\n",
        "a rank arrives while threads of it still write what it shows",
        "all_reduce",
    ),
    Mutant(
        "no_sync_after_arrival",
        WAITING,
        "    check_fingerprint(group, state, call, awaited, seen, call.fingerprint);\n"
        "  }\n  __syncthreads();\n",
        "    check_fingerprint(group, state, call, awaited, seen, call.fingerprint);\n  }\n",
        "threads go on before their block has met its peers",
        "all_reduce",
    ),
    Mutant(
        "no_sync_after_looking_up_places",
        SHARED,
        "places[thread] = resolve(in.call.output[target]);\n  __syncthreads();\n",
        "places[thread] = resolve(in.call.output[target]);\n",
        "threads read where vectors lie before others have looked it up",
        "shared_device",
        "thread",
        ("data race", "SEGV"),  # what is there before is no address
    ),
    Mutant(
        "dead_group_writes",
        SHARED,
        "  if (*in.call.given_up != 0 || !agrees(in.call.agreement)) return;\n",
        "",
        "a rank whose group is dead writes into vectors that peers have back",
        "shared_device",
        "",
        WRONG,
    ),
    Mutant(
        "place_without_its_offset",
        SHARED,
        "+ offset + place.offset;",
        "+ offset;",
        "a part of a vector is looked for at the beginning of it",
        "shared_device",
        "address",
        (*WRONG, "simt:", "AddressSanitizer", "runtime error"),
    ),
    Mutant(
        "no_sync_before_reading_sums",
        FUSED,
        "    __syncwarp();\n#pragma unroll\n",
        "#pragma unroll\n",
        "threads add partial sums that others have not written yet",
        "fused",
    ),
    Mutant(
        "no_sync_after_reading_sums",
        FUSED,
        "    __syncwarp();  // the next chunk writes there\n",
        "",
        "partial sums of the next chunk overwrite those of this one",
        "fused",
    ),
    Mutant(
        "no_sync_between_halves",
        FUSED,
        "    __syncthreads();\n    if (threadIdx.x < half)",
        "    if (threadIdx.x < half)",
        "sums of chunks are added before they are there",
        "fused",
    ),
    Mutant(
        "sums_in_another_order",
        FUSED,
        "(pack * kWarpThreads + thread) * kLength + place",
        "(thread * kPacks + pack) * kLength + place",
        "sums of squares have other bits than on the CPU",
        "fused",
        "",
        (*WRONG, "simt:"),
    ),
    Mutant(
        "no_sync_before_terms_are_added",
        CODEC_TEAM,
        "    sync(within_warp);\n    const uint32_t first",
        "    const uint32_t first",
        "a sum of a block takes terms that are not there yet",
        "encode",
        "thread",
        ("data race", *WRONG),
    ),
    Mutant(
        "no_sync_before_a_sum_is_read",
        CODEC_TEAM,
        "    sync(within_warp);\n    return sums[",
        "    return sums[",
        "threads read the sum of their block before it is there",
        "encode",
        "thread",
        ("data race", *WRONG),
    ),
    Mutant(
        "blocks_of_two_warps_as_of_one",
        CODEC_TEAM,
        "const bool within_warp = block_ <= kWarpValues;",
        "const bool within_warp = block_ <= 2 * kWarpValues;",
        "a warp adds up what another one has",
        "encode",
        "thread",
        ("data race", *WRONG),
    ),
    Mutant(
        "maxima_not_alternated",
        CODEC_TEAM,
        "    odd_ = !odd_;\n",
        "",
        "maxima of a tile are written while threads still read those of the one before",
        "encode",
    ),
    Mutant(
        "no_sync_after_drawing_numbers",
        CODEC_TEAM,
        "/ element::kRandomGroup, room);\n      __syncwarp();\n",
        "/ element::kRandomGroup, room);\n",
        "threads round by numbers that others have not drawn yet",
        "encode",
        "thread",
        ("data race", *WRONG),
    ),
    Mutant(
        "no_sync_before_drawing_numbers",
        CODEC_TEAM,
        "      __syncwarp();  // others may still read there\n",
        "",
        "numbers are overwritten by those of the next tile",
        "encode",
    ),
    Mutant(
        "numbers_of_the_vector_before",
        CODEC,
        "key.first + call_.vector[unit.vector].first + warp_first",
        "key.first + warp_first",
        "vectors of a call are rounded by the same numbers",
        "encode",
        "",
        WRONG,
    ),
    Mutant(
        "block_sums_in_another_order",
        CODEC_TEAM,
        "for (uint32_t half = kLanes / 2; half > 0; half /= 2) {",
        "for (uint32_t half = 1; half < kLanes; half *= 2) {",
        "the mean of a block is rounded otherwise than on the CPU",
        "encode",
        "",
        WRONG,
    ),
    Mutant(
        "codes_beyond_the_end",
        CODEC,
        "      code = k < n ? code : 0;\n",
        "",
        "codes of values that are not there stand where zeros belong",
        "encode",
        "",
        WRONG,
    ),
    Mutant(
        "no_zeros_behind_scales",
        CODEC,
        "    if (block == last) clear(",
        "    if (block + 1 == last) clear(",
        "bytes of the code are what they were before",
        "encode",
        "",
        WRONG,
    ),
    Mutant(
        "residual_taken_twice",
        CODEC,
        "if (unit.values == 0 || (pass_ == Pass::first && keeps)) return;",
        "if (unit.values == 0) return;",
        "fp16 changes the residual before it knows the exponent",
        "encode",
        "",
        WRONG,
    ),
    Mutant(
        "value_beyond_the_end",
        CODEC_UNITS,
        "x[k] = k < n ? from[k] : T{};",
        "x[k] = k <= n ? from[k] : T{};",
        "a value behind the last one is read",
        "encode",
        "address",
        ("AddressSanitizer",),
    ),
    Mutant(
        "misaligned_units",
        CODEC_UNITS,
        "  if (n == kUnit && device::is_aligned16(to)) {\n",
        "  if (n == kUnit) {\n",
        "sixteen bytes are stored at an address that is no multiple of 16",
        "decode",
        "",
        ("simt:",),
    ),
    Mutant(
        "reciprocal_of_the_divisor",
        CODEC,
        "sum[k] = sum[k] / call.divisor;",
        "sum[k] = sum[k] * (1 / call.divisor);",
        "means are rounded otherwise than on the CPU",
        "decode",
        "",
        WRONG,
    ),
    Mutant(
        "any_nan",
        CODEC,
        "    sum[k] = element::only_nan(sum[k]);\n",
        "",
        "NaN are those of the hardware",
        "decode",
        "",
        WRONG,
    ),
    Mutant(
        "codes_of_the_first_vector",
        CODEC,
        "call.code + unit.vector * call.codes;",
        "call.code;",
        "vectors of a call get the values of the first",
        "decode",
        "address",
        (*WRONG, "AddressSanitizer"),
    ),
    Mutant(
        "mismatch_unseen",
        WAITING,
        "  if (same_number && static_cast<uint32_t>(seen >> 32) != fingerprint) {",
        "  if (same_number && false) {",
        "ranks that call different things sum them",
        "failures",
        "",
        WRONG,
    ),
]
