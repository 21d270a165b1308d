"""The core of pycoll without torch.

One file, however long: a stub is what there is at run time, and there it is one module.
"""

import builtins
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

# ---- errors ----------------------------------------------------------------------------------

class Error(RuntimeError):
    """Base class of all errors of pycoll."""

class InvalidArgumentError(Error, ValueError):
    """The caller's fault, found before memory was touched."""

class MismatchError(Error):
    """The ranks called different things."""

class PeerError(Error):
    """Another process died or left."""

class TimeoutError(Error, builtins.TimeoutError):
    """A deadline passed."""

class AbortedError(Error):
    """This group was aborted, here or by a peer."""

class UnsupportedError(Error, NotImplementedError):
    """Known, but not in pycoll yet."""

class OperatingSystemError(Error, OSError):
    """The operating system refused something."""

# ---- programs --------------------------------------------------------------------------------

StepKind = Literal[
    "send",
    "recv",
    "recv_copy_send",
    "recv_send",
    "recv_reduce",
    "recv_reduce_send",
    "recv_reduce_copy_send",
    "copy",
    "reduce_from",
    "copy_from",
    "reduce_to",
    "barrier",
]
Space = Literal["none", "input", "output", "acc", "window"]
Wire = Literal["value", "partial"]
Order = Literal["none", "rank_order", "ring_order", "lower_first"]
CheckKind = Literal[
    "ok",
    "invalid",
    "deadlock",
    "wrong_result",
    "wrong_order",
    "race",
    "leftover",
    "mismatch",
]

class Ref:
    """A chunk of one of a rank's memories."""

    space: Space
    chunk: int
    def __init__(self, space: Space = "none", chunk: int = 0) -> None: ...
    def __eq__(self, other: object) -> bool: ...

class Step:
    """One step of a lane. `src` and `dst` are copies: assign a new Ref to change them."""

    kind: StepKind
    src: Ref
    dst: Ref
    from_rank: int
    to_rank: int
    channel: int
    group: int
    remote_chunk: int
    remote: Space
    wire: Wire
    received_first: bool
    def __init__(self, kind: StepKind | Step = "barrier") -> None: ...
    def __eq__(self, other: object) -> bool: ...

class Lane:
    """Steps that a rank executes one after the other. `steps` is a copy."""

    steps: list[Step]
    def __init__(self, steps: Sequence[Step] = ()) -> None: ...
    def __eq__(self, other: object) -> bool: ...

class Program:
    """What one rank does in a collective. Lists are copies; `set_steps` changes a lane."""

    collective: str
    algorithm: str
    rank: int
    world_size: int
    root: int
    input_chunks: int
    output_chunks: int
    acc_chunks: int
    window_chunks: int
    channels: int
    order: Order
    ring: list[int]
    groups: list[list[int]]
    lanes: list[Lane]
    needs_lease: bool
    lends_input: bool
    lends_output: bool
    def __init__(self, other: Program = ...) -> None: ...
    def steps(self, lane: int = 0) -> list[Step]: ...
    def set_steps(self, lane: int, steps: Sequence[Step]) -> None: ...

class AlgorithmInfo:
    """A row of the table of algorithms."""

    @property
    def collective(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def needs_window(self) -> bool:
        """Works on memory that all ranks share."""
    @property
    def needs_lease(self) -> bool:
        """Works on the ranks' own vectors: another algorithm runs a call where some are private."""
    @property
    def min_depth(self) -> int:
        """FIFO slots without which it deadlocks at some world size."""

class CheckResult:
    @property
    def ok(self) -> bool: ...
    @property
    def kind(self) -> CheckKind: ...
    @property
    def message(self) -> str:
        """Names rank, lane and step; empty when ok."""
    def __bool__(self) -> bool: ...

class TraceRow:
    @property
    def time(self) -> int:
        """Longest chain of messages, barriers and reads of peers; 0 is the input."""
    @property
    def values(self) -> list[list[float]]:
        """Of each rank; NaN where it holds nothing yet (all_gather, gather, scatter)."""

class Transfer:
    """One message, or one read of a peer's window."""

    @property
    def time(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def destination(self) -> int: ...
    @property
    def chunk(self) -> int:
        """Of the vector that the rows show."""
    @property
    def lane(self) -> int: ...
    @property
    def text(self) -> str:
        """The step of the rank that receives or reads."""

class Trace:
    @property
    def rows(self) -> list[TraceRow]: ...
    @property
    def transfers(self) -> list[Transfer]:
        """In the order of time."""

def collectives() -> list[str]: ...
def algorithms(collective: str) -> list[AlgorithmInfo]: ...
def build_programs(
    collective: str, algorithm: str, world_size: int, root: int = 0, hosts: Sequence[int] = ()
) -> list[Program]:
    """One Program a rank. Raises InvalidArgumentError with the names that exist.

    `hosts`: the host of each rank, numbered by first appearance; empty: all on one.
    """

# Collective, algorithm, from, to (bytes), least and most ranks, transport, several hosts.
TableRow = tuple[str, str, int, int, int, int, str, bool | None]

def select_algorithm(
    collective: str,
    bytes: int,
    *,
    has_window: bool,
    several_hosts: bool,
    rules: str = "",
    table: Sequence[TableRow] = (),
    ranks: int = 2,
    transport: str = "shm",
    determinism: str = "",
    leases: bool = False,
) -> str:
    """The name of the algorithm that a call of that size would use.

    `has_window`: all ranks can read each other's memory; `rules`: as in PYCOLL_ALGO; `determinism`
    as in PYCOLL_DETERMINISM, empty for the default; `leases`: all vectors are in shareable memory.
    """

def validate(program: Program) -> None:
    """Raises InvalidArgumentError, with rank, lane and step, for an unsafe Program."""

def check(
    programs: Sequence[Program],
    depth: int = 2,
    rounds: int = 3,
    in_place: bool = True,
    draws: int = 2,
    seed: int = 0,
) -> CheckResult:
    """Proves that the Programs of all ranks do what their collective promises.

    `depth`: slots of every FIFO; `rounds`: slices of the longest chunk; `in_place`: input and
    output are the same memory, which includes the other case; `draws`: how often lengths are drawn
    at random, from `seed` on, for blocks that may differ.
    """

def trace(programs: Sequence[Program], inputs: Sequence[Sequence[float]], op: str = "sum") -> Trace:
    """Runs the Programs on numbers: one slice of every chunk.

    `inputs[rank]` have the same length (reduce_scatter: a multiple of the world size; a barrier
    ignores them). Ops: sum, avg, product, min, max. Raises InvalidArgumentError for other inputs
    and for Programs that `check` rejects.
    """

def chunk_range(count: int, chunks: int, chunk: int, align: int = 1) -> tuple[int, int]:
    """Elements [begin, end) of a chunk of a vector of `count` elements."""

# ---- simulator -------------------------------------------------------------------------------

class HostModel:
    """What a host costs: bytes a second (inf: no limit) and seconds; csrc/simulator/machine.h."""

    cores: float
    cache_bandwidth: float
    peer_bandwidth: float
    core_bandwidth: float
    memory_bandwidth: float
    cache_bytes: float
    reduce_bandwidth: float
    call_overhead: float
    step_overhead: float
    flag_latency: float
    switch_overhead: float
    def __init__(self) -> None: ...

class NetworkModel:
    """Full-duplex ports of hosts, shared by their ranks."""

    bandwidth: float
    latency: float
    message_overhead: float
    cpu_bandwidth: float
    def __init__(self) -> None: ...

class MachineModel:
    """Hosts that are alike. `host` and `network` are parts of it, not copies."""

    host: HostModel
    network: NetworkModel
    ranks_per_host: int
    """Rank r is on host r // ranks_per_host; 0: all on one."""
    def __init__(self) -> None: ...

class SimulationResult:
    """One simulated call."""

    @property
    def seconds(self) -> float:
        """Until the last rank has finished."""
    @property
    def finished(self) -> list[float]:
        """Of each simulated rank."""
    @property
    def rounds(self) -> int: ...
    @property
    def steps(self) -> int:
        """Executed, by the simulated ranks."""
    @property
    def events(self) -> int: ...
    @property
    def simulated_ranks(self) -> int:
        """Fewer than all where the other hosts are known to see the same (exact)."""
    @property
    def compared_hosts(self) -> int:
        """Whose Programs were compared with host 0's before they were taken to be alike."""
    @property
    def network_bytes(self) -> float:
        """Between all hosts."""
    @property
    def network_messages(self) -> int: ...

def simulate(
    collective: str,
    algorithm: str,
    ranks: int,
    bytes: int,
    machine: MachineModel,
    *,
    dtype: str = "float32",
    root: int = 0,
    in_place: bool = True,
    slot_bytes: int = ...,
    fifo_depth: int = ...,
    window_bytes: int = ...,
    use_symmetry: bool = True,
    symmetry_from: int = ...,
    most_steps: int = ...,
) -> SimulationResult:
    """Runs the Programs of a collective on a described machine.

    `bytes`: of the longest of a rank's vectors (all blocks together where there are blocks).
    `symmetry_from`: steps of all ranks and rounds from which on alike hosts are looked for.
    Raises InvalidArgumentError for wrong requests, for an algorithm that cannot run there, for more
    than `most_steps` steps to hold in memory, and for a deadlock.
    """

# ---- kernels ---------------------------------------------------------------------------------

def isas() -> list[str]:
    """Instruction sets that this CPU and build can run, best last."""

def best_isa() -> str:
    """The instruction set that collectives use."""

def dtypes() -> list[str]:
    """Names of the element types that collectives can move."""

def why_not_reducible(dtype: str, op: str) -> str:
    """Why `op` is not defined for `dtype`; empty when it is."""

def acc_dtype(dtype: str, op: str) -> str:
    """Name of the type that partial results of `op` over `dtype` are held in."""

def reduce_local(
    a: Buffer,
    b: Buffer,
    dtype: str,
    op: str,
    isa: str,
    a_acc: bool = False,
    b_acc: bool = False,
    out: Buffer | None = None,
) -> Buffer:
    """a (+) b as accumulators, from buffers of values, or of accumulators where `*_acc`."""

def widen(src: Buffer, dtype: str, op: str, isa: str, out: Buffer | None = None) -> Buffer:
    """Values as accumulators, where the two types differ."""

def finish(
    acc: Buffer, dtype: str, op: str, world_size: int, isa: str, out: Buffer | None = None
) -> Buffer:
    """Accumulators as values: AVG divides by `world_size`, then 8 and 16-bit floats round."""

def sum_rows(
    terms: Sequence[Buffer],
    targets: Sequence[Buffer],
    dtype: str,
    op: str,
    world_size: int,
    isa: str,
) -> bool:
    """Stores the finished sum of all terms into every target, in one pass.

    False, and nothing is done, where there is no such kernel for `op` of `dtype`.
    """

def scale(src: Buffer, dtype: str, factor: float, isa: str, out: Buffer | None = None) -> Buffer:
    """Values times a factor, rounded once: what PREMUL_SUM does to the input of each rank."""

# ---- codecs ----------------------------------------------------------------------------------

# What has the buffer protocol.
Lent: TypeAlias = Buffer | npt.NDArray[Any]

class Codec:
    def __init__(self, *, kind: str, block: int = 256, stochastic: bool = False) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def stochastic(self) -> bool: ...
    def code_bytes(self, count: int) -> int:
        """Bytes of the code of `count` values."""

class RandomKey:
    def __init__(self, *, seed: int = 0, step: int = 0, rank: int = 0, first: int = 0) -> None: ...

class CodecChoice:
    """The codec of a call, and what its random numbers depend on; step None: the call's number."""

    def __init__(self, codec: Codec, seed: int, step: int | None = None) -> None: ...

def codecs() -> list[tuple[str, int, int, bool, bool]]:
    """Rows (name, bits a value, floats a block, may be stochastic, always is)."""

def encode(
    *,
    codec: Codec,
    values: Lent,
    dtype: str,
    code: Lent,
    key: RandomKey,
    residual: Lent | None = None,
    isa: str = "",
) -> None:
    """Writes the code of `values` + `residual`; the residual becomes what the code lacks."""

def decode(
    *,
    codec: Codec,
    codes: Sequence[Lent],
    values: Lent,
    dtype: str,
    divisor: float = 1.0,
    isa: str = "",
) -> None:
    """Writes the sum of what the codes hold, in their order, divided."""

# ---- fused kernels -----------------------------------------------------------------------------

# Rows of address, elements and dtype (its place in dtypes()). The caller holds the memory.
Spans: TypeAlias = npt.NDArray[np.uint64]

def cast(*, targets: Spans, sources: Spans, scale: float, isa: str = "") -> bool:
    """Writes sources times `scale` to targets; whether a result is infinite or NaN."""

def unscale(*, tensors: Spans, factor: float, isa: str = "") -> tuple[bool, float]:
    """Multiplies in place: (whether a value is infinite or NaN, the sum of squares)."""

def multiply(*, tensors: Spans, factor: float, isa: str = "") -> None:
    """Multiplies in place."""

def fused_room(tensors: Spans) -> int:
    """Bytes of device memory for calls on such a list."""

class DeviceFused:
    """The fused kernels of the GPU's library at `library`. Memory goes by address, streams are
    cudaStream_t; a call is queued and does not wait. `room`: fused_room() bytes, aligned to 16.
    """

    def __init__(self, library: str) -> None: ...
    @property
    def device(self) -> str:
        """The type of devices: cuda."""

    def cast(
        self,
        *,
        targets: Spans,
        sources: Spans,
        scale: float,
        stream: int,
        room: int,
        found_inf: int,
    ) -> None:
        """`found_inf`: a float32, set to 1 where a result is infinite or NaN, else left alone."""

    def unscale(
        self,
        *,
        tensors: Spans,
        factor: float,
        factor_at: int,
        sum_of_squares: int,
        stream: int,
        room: int,
        found_inf: int,
    ) -> None:
        """`factor_at`: a float32 instead of `factor`, or 0. `sum_of_squares`: a float64."""

    def multiply(self, *, tensors: Spans, factor: float, stream: int, room: int) -> None: ...
    def clip(
        self, *, tensors: Spans, sum_of_squares: int, max_norm: float, stream: int, room: int
    ) -> None: ...

class DeviceCodecs:
    """The codecs of the GPU's library at `library`. Memory goes by address, streams are
    cudaStream_t; a call is queued on `stream`, behind the work of `after`, and does not wait.
    """

    def __init__(self, library: str) -> None: ...
    @property
    def device(self) -> str:
        """The type of devices: cuda."""

    def encode(
        self,
        *,
        codec: Codec,
        values: int,
        count: int,
        dtype: str,
        code: int,
        key: RandomKey,
        stream: int,
        after: Sequence[int],
    ) -> None: ...
    def decode(
        self,
        *,
        codec: Codec,
        code: int,
        values: int,
        count: int,
        dtype: str,
        stream: int,
        after: Sequence[int],
    ) -> None: ...

# ---- communicator ----------------------------------------------------------------------------

class Call:
    """One collective: what pycoll.Communicator hands to the core."""

    def __init__(
        self,
        *,
        collective: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        dtype: str,
        op: str,
        factor: float,
        root: int,
        algorithm: str,
        timeout: float | None,
        on_result: Callable[[], object] | None,
    ) -> None: ...

class Message:
    """One side of a point-to-point message; `peer` None receives from any rank."""

    def __init__(
        self,
        *,
        receives: bool,
        array: Any,
        dtype: str,
        peer: int | None,
        tag: int,
        timeout: float | None,
        on_result: Callable[[], object] | None,
        codec: CodecChoice | None,
    ) -> None: ...

class WorkCore:
    """An operation in flight; the arrays live as long as it does."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def done(self) -> bool: ...
    @property
    def sequence(self) -> int: ...
    @property
    def source(self) -> int:
        """The rank whose message a finished receive took; else -1."""

class DeviceCall:
    """One collective on arrays of a GPU, as (address, elements)."""

    def __init__(
        self,
        *,
        collective: str,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        dtype: str,
        op: str,
        factor: float,
        root: int,
        algorithm: str,
        timeout: float,
    ) -> None: ...

class DeviceMessage:
    """One side of a message between GPUs."""

    def __init__(
        self,
        *,
        receives: bool,
        array: tuple[int, int],
        dtype: str,
        peer: int,
        tag: int,
        timeout: float,
    ) -> None: ...

class DeviceWork:
    """A call that was queued on a stream."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def done(self) -> bool: ...
    @property
    def source(self) -> int:
        """The rank that a receive takes from; else -1."""

class DeviceCalls:
    """A communicator's calls on arrays of GPUs."""

    def run(
        self, asked: DeviceCall | DeviceMessage, stream: int, after: Sequence[int], awaited: bool
    ) -> DeviceWork | None:
        """Queues it. Streams are cudaStream_t; the call comes after the work of all of them."""

    def run_codec(
        self,
        call: DeviceCall,
        choice: CodecChoice,
        residual: tuple[int, int] | None,
        sum_residual: tuple[int, int] | None,
        stream: int,
        after: Sequence[int],
        awaited: bool,
    ) -> DeviceWork | None: ...

class CommunicatorCore:
    """A group of ranks; see pycoll.Communicator."""

    def __init__(
        self,
        *,
        store: Any,
        rank: int,
        world_size: int,
        prefix: str,
        timeout: float,
        variables: dict[str, str],
        table: Sequence[TableRow],
        agreed: dict[str, str] = ...,
    ) -> None:
        """`agreed`: what else must be equal on all ranks, by names without spaces."""
    def all_reduce_at_once(self, array: Any, op: str) -> bool:
        """False: not a plain call on an idle group, nothing has happened."""
    def run(self, call: Call) -> None: ...
    def submit(self, call: Call) -> WorkCore: ...
    def run_message(self, message: Message) -> int:
        """The rank that sent it; -1 for a send."""
    def submit_message(self, message: Message) -> WorkCore: ...
    def compresses(self, collective: str, dtype: str, op: str) -> bool:
        """False: such calls are exempt from codecs."""

    def submit_codec(
        self,
        call: Call,
        choice: CodecChoice,
        residual: npt.NDArray[Any] | None,
        sum_residual: npt.NDArray[Any] | None,
    ) -> WorkCore: ...
    def devices(self, library: str) -> DeviceCalls:
        """Opens the GPU's library at that path, once."""
    def close(self) -> None: ...
    def abort(self, why: str) -> None: ...
    def dead(self) -> bool: ...
    def sequence(self) -> int: ...
    def transport(self) -> str: ...
    def statistics(self) -> dict[str, int]: ...
    def algorithm_for(self, collective: str, bytes: int) -> str: ...
    def override_program(self, program: Program) -> None:
        """Runs `program` for every later call of its collective: for tests of the prover."""

def check_variable(name: str, value: str) -> None:
    """Raises InvalidArgumentError when a PYCOLL_* variable cannot have this value."""

def config_variables() -> list[tuple[str, str, str, str, bool]]:
    """Rows (name, value in force, default, help, must be equal on all ranks)."""

def try_transports() -> list[tuple[str, str, str]]:
    """Rows (name, what it is, why this process cannot use it; empty when it can), best first."""

def available_cpus(root: str = "/") -> int:
    """CPUs that the calling thread may use, by affinity mask and cgroup quota; at least 1.

    `root` stands for the file system's root.
    """

def cgroup_cpus(root: str = "/") -> float | None:
    """The tightest quota of this process's control groups in CPUs; None without one."""

def host_identity() -> str:
    """Ranks with the same identity are on one host and share memory."""

# ---- shareable memory ------------------------------------------------------------------------

class Arena:
    """Memory that peers can map; for tests. Addresses are integers, sizes bytes."""

    fd: int
    bytes: int
    base: int
    def __init__(self, bytes: int, *, cache_bytes: int = ..., large_pages: bool = True) -> None: ...
    def allocate(self, bytes: int) -> int | None: ...
    def free(self, block: int) -> None: ...
    def offset_of(self, address: int, bytes: int) -> int | None: ...
    def quarantine(self, offset: int, bytes: int) -> int: ...
    def release(self, ticket: int) -> None: ...
    def large_pages_problem(self) -> str: ...
    def statistics(self) -> dict[str, int]: ...

def process_arena() -> Arena | None:
    """The arena of this process; None without one."""

def process_arena_problem() -> str:
    """Why there is none; empty while there is one, or nobody has asked for it."""

def allocate_shareable(bytes: int) -> npt.NDArray[np.uint8] | None: ...
def is_shareable(address: int, bytes: int) -> bool: ...
def shareable_statistics() -> dict[str, int]:
    """Without making an arena: zeros until there is one."""

# ---- flight records --------------------------------------------------------------------------

def flight_snapshot() -> bytes:
    """The records of this module's groups (pycoll/flight/records.py); empty when there are none."""

def dump_flight(directory: str) -> str:
    """Writes them into a file there and returns its path; empty when there are none."""

def describe_call(call: bytes) -> str:
    """A recorded call in words, from its 40 bytes."""

def call_fingerprint(call: bytes) -> int:
    """Equal for calls that fit together, from the 40 bytes of one."""

def dtype_name(dtype: int) -> str:
    """The name of a recorded dtype."""

def ticks() -> int:
    """What this processor's time stamp counts now."""
