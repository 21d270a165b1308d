"""The vectors that a rank's calls work on. All contenders use the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycoll.bench.machine import last_level_cache
from pycoll.bench.problem import Problem

PAGE = 4096
MOST_SETS = 4096  # tiny vectors in turn: each has pages of its own, so these fill second-level TLBs
CHUNK = 1 << 20  # elements that are filled or compared at a time, so that temporaries stay small


@dataclass(frozen=True)
class Operands:
    """One call's vectors; the same memory where the collective works in place."""

    input: torch.Tensor
    output: torch.Tensor


class Buffer:
    """One piece of memory for all sizes, touched once: nobody pays for another's page faults."""

    def __init__(self, problems: list[Problem], memory: str, cold: bool) -> None:
        self._cold = cold
        needed = max(self._stride(problem) * self._sets(problem) for problem in problems)
        self.bytes = allocate(max(needed, PAGE), memory).fill_(1)

    def operands(self, problem: Problem) -> list[Operands]:
        """What the calls take in turn: one set, or together more than the caches hold."""
        stride = self._stride(problem)
        starts = range(0, stride * self._sets(problem), stride) if stride else [0]
        return [self._place(problem, start) for start in starts]

    def _place(self, problem: Problem, start: int) -> Operands:
        given = self._view(problem, start, problem.input_elements)
        if problem.kind.in_place:
            return Operands(given, given)
        after = start + pages(problem.input_elements * problem.dtype.itemsize)
        return Operands(given, self._view(problem, after, problem.output_elements))

    def _view(self, problem: Problem, start: int, elements: int) -> torch.Tensor:
        stop = start + elements * problem.dtype.itemsize
        return self.bytes[start:stop].view(problem.dtype)

    def _stride(self, problem: Problem) -> int:
        lengths = [problem.input_elements]
        if not problem.kind.in_place:
            lengths.append(problem.output_elements)
        return sum(pages(length * problem.dtype.itemsize) for length in lengths)

    def _sets(self, problem: Problem) -> int:
        stride = self._stride(problem)
        if not self._cold or not stride:
            return 1
        # The last-level cache is shared by the ranks of a machine; twice as much is surely out.
        area = 2 * last_level_cache() // problem.ranks
        return max(2, min(MOST_SETS, -(-area // stride)))


def allocate(size: int, memory: str) -> torch.Tensor:
    """`size` bytes that begin on a page. Raises RuntimeError where there is no such memory."""
    if memory == "ordinary":
        raw = torch.empty(size + PAGE, dtype=torch.uint8)
        skip = -raw.data_ptr() % PAGE
        return raw[skip : skip + size]
    import pycoll

    if not hasattr(pycoll, "empty"):
        raise RuntimeError("this build of pycoll has no shareable memory (pycoll.empty)")
    tensor: torch.Tensor = pycoll.empty(size, dtype=torch.uint8)
    # Where there is no arena it is ordinary memory, which nobody should take for shareable.
    if not pycoll.is_shareable(tensor):
        raise RuntimeError(f"no shareable memory of {size} bytes: `pycoll doctor` says why")
    return tensor


def pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def chunks(elements: int) -> list[tuple[int, int]]:
    return [(at, min(at + CHUNK, elements)) for at in range(0, elements, CHUNK)]


def refill(tensor: torch.Tensor) -> None:
    """Ordinary values. Repeated sums in place grow to inf, which costs no more to add. Zeros would
    stay, but would not do: some CPUs skip writing zeros over zeros."""
    for start, stop in chunks(tensor.numel()):
        tensor[start:stop] = torch.arange(start, stop) % 119 + 1


def write_pattern(problem: Problem, operands: Operands) -> None:
    """The input that `Problem.expected` is about, and an output that nobody expects."""
    operands.output.fill_((problem.dtype.is_signed and -1) or 255)
    for start, stop in chunks(operands.input.numel()):
        operands.input[start:stop] = problem.given(problem.rank, start, stop)


def count_wrong(problem: Problem, operands: Operands) -> int:
    """Elements of this rank's output that are not what they must be, bit for bit."""
    wrong = 0
    for start, stop in chunks(operands.output.numel()):
        expected = problem.expected(start, stop)
        if expected is not None:
            got = operands.output[start:stop].to(torch.int64)
            # A NaN or a fraction would be rounded to what might be right.
            exact = operands.output[start:stop] == expected.to(problem.dtype)
            wrong += int(((got != expected) | ~exact).sum())
    return wrong
