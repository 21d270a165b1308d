"""What to measure and how, and what comes out. Plain data that travels between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

# nccl-tests' names and torch's; torch's is what a plan holds.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "float32": "float32",
    "float64": "float64",
    "float16": "float16",
}
OPERATIONS = ("sum", "prod", "min", "max", "avg")
MEMORY = ("ordinary", "shareable")
APIS = ("dist", "direct")


@dataclass(frozen=True)
class Contender:
    """Who is measured: a backend, for pycoll with an algorithm forced ("" lets it choose)."""

    backend: str
    algorithm: str = ""
    api: str = "dist"

    @property
    def name(self) -> str:
        name = self.algorithm or self.backend
        return name if self.api == "dist" else f"{name}.{self.api}"


@dataclass(frozen=True)
class Plan:
    """The same on every rank."""

    contenders: tuple[Contender, ...]
    sizes: tuple[int, ...]  # bytes
    collective: str = "all_reduce"
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    memory: str = "ordinary"
    cold: bool = False  # rotate through more memory than the caches hold
    rewrite: bool = False  # write the input anew before each call, and time each call alone
    asynchronous: bool = False  # async_op=True, then wait
    iterations: int = 0  # calls a batch; 0: as many as take about batch_seconds
    batch_seconds: float = 0.025
    warmup: int = 5
    rounds: int = 21
    fewest_rounds: int = 5  # whatever size_seconds says
    # Batches whose calls are timed one by one. Reading the clock costs a call about 0.1 us, so they
    # are kept apart from the rounds that give the median.
    stamped_rounds: int = 3
    size_seconds: float = 4.0  # for the rounds of one size: large ones get fewer rounds
    check: bool = False
    seed: int = 1
    timeout: float = 300.0  # seconds, of each call


@dataclass
class Sample:
    """One contender at one size. Times are microseconds a call, of the slowest rank.

    A collective is finished when its last rank is: the mean over ranks, or rank 0 alone, would
    credit an algorithm for letting some ranks go early.
    """

    name: str
    iterations: int
    rounds: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # CPU time of all ranks together, by round
    wrong: int | None = None  # elements over all ranks; None: not checked


@dataclass
class Row:
    """All contenders at one size."""

    bytes: int
    count: int  # elements, as nccl-tests counts them: of a rank's block where there are blocks
    samples: list[Sample]
