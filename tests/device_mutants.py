"""Bugs put into the device kernels on purpose, and into what orders them: the host's side of groups
on one GPU and on several hosts. Each has the check that must find it.

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
WRONG = ("FAILED",)
CREDIT = "credit_of(group_, step.from, group_.rank, fifo),"
SYNC = "    __syncthreads();\n"

GROUPS = "csrc/runtime/device/"
HOSTS = GROUPS + "hosts_group.cpp"
HOST_WORK = GROUPS + "host_work.cpp"
SHARED_GROUP = GROUPS + "shared_device_group.cpp"

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
        "no_meeting_before_reading_peers",
        SHARED_GROUP,
        "  meet(Word::ready, stream, std::move(words));\n",
        "  driver_.enqueue(words, stream);\n",
        "peers' vectors are read before they are there",
        "collectives",
        program="groups",
    ),
    Mutant(
        "no_meeting_after_reading_peers",
        SHARED_GROUP,
        "  meet(Word::done, stream);\n  if (sums_by_parts(request, round)) copy_out",
        "  if (sums_by_parts(request, round)) copy_out",
        "vectors are written while peers read them",
        "collectives",
        program="groups",
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
    Mutant(
        "word_not_taken_back",
        HOST_WORK,
        "{wait_for(word_of(slot), 1), write(word_of(slot), 0)}",
        "{wait_for(word_of(slot), 1)}",
        "the next piece in a slot is copied back before it was summed",
        "sums",
        "",
        WRONG,
        "groups",
    ),
    Mutant(
        "slot_not_waited_for",
        HOSTS,
        "      host().end(slot, stream);\n",
        "      if (k % 3 != 0) host().end(slot, stream);\n",
        "some pieces are copied back before they were summed",
        "sums",
        "",
        WRONG,
        "groups",
    ),
    Mutant(
        "partial_sums_rounded",
        HOSTS,
        "  Sum sum{kernels->acc, ",
        "  Sum sum{request.dtype, ",
        "sums of 16-bit floats are rounded in each host, and again between them",
        "sums",
        "",
        WRONG,
        "groups",
    ),
    Mutant(
        "not_divided",
        HOSTS,
        "  if (sum.divides) divide(sum.dtype, share, stream);\n",
        "",
        "AVG is a sum",
        "sums",
        "",
        WRONG,
        "groups",
    ),
    Mutant(
        "not_gathered",
        HOSTS,
        "  gather(request, part.output, part.count, stream);\n",
        "",
        "a rank has its own share only",
        "sums",
        "",
        WRONG,
        "groups",
    ),
    Mutant(
        "other_numbers",
        HOSTS,
        '        throw among(members, "between hosts", error);\n',
        "        throw;\n",
        "an error counts ranks as those between hosts do",
        "killed_amid",
        "",
        WRONG,
        "groups",
    ),
]
