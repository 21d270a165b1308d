"""Bugs put on purpose into the host's side of groups on GPUs, as device_mutants.py has them of the
kernels: into what orders calls of ranks on one GPU and of several hosts, and into what carries
collectives over codecs."""

from __future__ import annotations

from device_mutants import WRONG, Mutant

GROUPS = "csrc/runtime/device/"
HOSTS = GROUPS + "hosts_group.cpp"
HOST_WORK = GROUPS + "host_work.cpp"
SHARED_GROUP = GROUPS + "shared_device_group.cpp"
RUNNER = GROUPS + "codec_runner.cpp"
CARRIER = GROUPS + "staged_carrier.cpp"


def codecs(name: str, file: str, find: str, replace: str, breaks: str) -> Mutant:
    return Mutant(name, file, find, replace, breaks, "codecs", "", WRONG, "groups")


MUTANTS = [
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
        '      throw among(members, "between hosts", error);\n',
        "      throw;\n",
        "an error counts ranks as those between hosts do",
        "killed_amid",
        "",
        WRONG,
        "groups",
    ),
    codecs(
        "codes_overwritten",
        RUNNER,
        "const size_t areas = std::min(jobs.size(), 2 * behind + 1);",
        "const size_t areas = 1;",
        "codes of the next portion are written while those of this one are on their way",
    ),
    codecs(
        "codes_not_waited_for",
        CARRIER,
        "  parts_.work.end(slot, stream);\n",
        "",
        "codes are decoded before they have come",
    ),
    codecs(
        "images_shared",
        CARRIER,
        "parts_.memory[slot].room(",
        "parts_.memory[slot - slot].room(",
        "calls that are under way have the same pinned memory",
    ),
    codecs(
        "own_codes_forgotten",
        RUNNER,
        "(peer == rank_ ? area.sent : area.received)",
        "area.received",
        "a rank adds something else than its own codes",
    ),
    codecs(
        "random_numbers_of_values",
        RUNNER,
        "const RandomKey key = key_of_sums(",
        "const RandomKey key = key_of_values(",
        "sums are rounded with the random numbers of values",
    ),
    codecs(
        "index_forgotten",
        RUNNER,
        "{values, part.count, code, part.residual, part.first}",
        "{values, part.count, code, part.residual, 0}",
        "all pieces have the same random numbers",
    ),
]
