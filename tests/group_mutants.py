"""Bugs put on purpose into the host's side of groups on GPUs, as device_mutants.py has them of the
kernels: into what carries collectives over codecs."""

from __future__ import annotations

from device_mutants import GROUPS, WRONG, Mutant

RUNNER = GROUPS + "codec_runner.cpp"
CARRIER = GROUPS + "staged_carrier.cpp"


def codecs(name: str, file: str, find: str, replace: str, breaks: str) -> Mutant:
    return Mutant(name, file, find, replace, breaks, "codecs", "", WRONG, "groups")


MUTANTS = [
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
