"""The checks of `pycoll doctor`. A new one is a function and a row in CHECKS."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from pycoll.cli import machine


class State(str, Enum):
    ok = "ok"
    info = "info"
    missing = "missing"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do when something is missing."""

    name: str
    state: State
    text: str
    advice: str = ""


REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def core() -> ModuleType | None:
    """The native core, or None when it does not load (`build` says why)."""
    try:
        return importlib.import_module("pycoll._core")
    except ImportError:
        return None


def build() -> list[Finding]:
    import pycoll

    where = str(Path(__file__).parents[1])
    version = getattr(pycoll, "__version__", "unknown version")
    return [
        Finding("pycoll", State.info, f"{version} in {where}"),
        Finding("Python", State.info, f"{platform.python_version()} ({sys.executable})"),
        Finding("system", State.info, f"{platform.system()} {platform.release()}"),
        native_core(),
        *torch_modules(),
    ]


def native_core() -> Finding:
    try:
        module = importlib.import_module("pycoll._core")
    except ImportError as error:
        advice = f"build it: {REBUILD}"
        return Finding("native core", State.missing, f"does not load: {error}", advice)
    return Finding("native core", State.ok, f"loaded ({Path(str(module.__file__)).name})")


def torch_modules() -> list[Finding]:
    from pycoll import _native

    built = [f"{major}.{minor}" for major, minor in _native.built_for()]
    text = f"built for torch {', '.join(built)}" if built else "none built for this Python"
    if importlib.util.find_spec("torch") is None:
        advice = "install torch, then rebuild pycoll, to use torch.distributed"
        return [
            Finding("torch", State.missing, "not installed", advice),
            Finding("torch module", State.info, text),
        ]
    import torch

    findings = [Finding("torch", State.info, torch.__version__)]
    try:
        _native.load()
    except ImportError as error:
        # The loader's own message says what to do.
        return [*findings, Finding("torch module", State.missing, f"{text}; {error}")]
    return [*findings, Finding("torch module", State.ok, f"loaded; {text}")]


def transports() -> list[Finding]:
    """Every transport, tried; and which ranks would count as being on this host."""
    module = core()
    if module is None:
        return [shared_memory("")]
    findings = []
    for name, summary, reason in module.try_transports():
        if name == "shm":
            findings.append(shared_memory(reason))
        elif reason:
            advice = "see `network` below; ranks of this machine can do without it"
            findings.append(Finding(name, State.missing, reason, advice))
        else:
            findings.append(Finding(name, State.ok, summary))
    text = f"{module.host_identity()}: ranks with the same identity share memory"
    return [*findings, Finding("host", State.info, text)]


def shared_memory(reason: str) -> Finding:
    """What the transport itself says is what counts; the probe says which part it is."""
    problems = [*([reason] if reason else []), *machine.shared_memory_problems()]
    if problems:
        advice = (
            "ranks of this machine cannot share memory; look at the container's seccomp "
            "profile, the kernel (5.3 or newer) and the limit on open files (ulimit -n)"
        )
        return Finding("shm", State.missing, "; ".join(problems), advice)
    text = (
        "memfd_create, a descriptor passed over an abstract unix socket, pidfd_open: all work "
        "(/dev/shm is not used)"
    )
    return Finding("shm", State.ok, text)


def shareable_memory() -> list[Finding]:
    """The arena of pycoll.empty and pycoll.shareable, made and tried."""
    module = core()
    if module is None or not hasattr(module, "process_arena"):
        advice = "the native core is needed to tell: see above"
        return [Finding("arena", State.missing, "unknown", advice)]
    arena = module.process_arena()
    if arena is None:
        advice = "tensors are in ordinary memory and collectives copy them through staging buffers"
        return [Finding("arena", State.missing, module.process_arena_problem(), advice)]
    text = f"{arena.bytes / 2**30:g} GiB of address space in one memfd; memory comes as it is used"
    return [Finding("arena", State.ok, text), large_pages(module)]


def large_pages(module: Any) -> Finding:
    # In an arena of its own: that of the process may have the block from before, with small pages.
    arena = module.Arena(1 << 26)
    block = arena.allocate(1 << 21)
    got = arena.statistics()["large"] > 0
    arena.free(block)
    if got:
        return Finding("large pages", State.ok, "MADV_COLLAPSE gives shared memory pages of 2 MiB")
    advice = "shareable memory works with small pages; the first use of each costs more"
    return Finding("large pages", State.info, f"none: {arena.large_pages_problem()}", advice)


def processors() -> list[Finding]:
    online = os.cpu_count() or 1
    allowed = sorted(os.sched_getaffinity(0))
    quota = machine.cgroup_cpus()
    findings = [
        Finding("model", State.info, machine.cpu_model()),
        Finding("CPUs", State.info, f"{online} online; this process may use {ranges(allowed)}"),
    ]
    if quota is None:
        findings.append(Finding("cgroup quota", State.info, "none"))
    elif quota >= len(allowed):
        findings.append(Finding("cgroup quota", State.info, f"{quota:g} CPUs"))
    else:
        text = f"{quota:g} CPUs, fewer than the {len(allowed)} allowed: ranks will be throttled"
        advice = f"run at most {max(1, int(quota))} ranks, or raise the quota"
        findings.append(Finding("cgroup quota", State.missing, text, advice))
    best = max(1, min(len(allowed), int(quota or len(allowed))))
    findings.append(Finding("ranks at full speed", State.info, f"{best}, one thread each"))
    return [*findings, instruction_sets()]


def instruction_sets() -> Finding:
    module = core()
    if module is None or not hasattr(module, "isas"):
        advice = "the native core is needed to tell: see above"
        return Finding("instruction sets", State.missing, "unknown", advice)
    text = f"{', '.join(module.isas())}; kernels use {module.best_isa()}"
    return Finding("instruction sets", State.ok, text)


def cuda() -> list[Finding]:
    findings = []
    if importlib.util.find_spec("torch") is not None:
        import torch

        version = getattr(torch.version, "cuda", None)
        text = f"built with CUDA {version}" if version else "built without CUDA"
        findings.append(Finding("torch", State.info, text))
    findings.append(Finding("driver", State.info, cuda_driver()))
    findings.append(gpu_library())
    return findings


def gpu_library() -> Finding:
    """What serves CUDA tensors, opened as the first group would."""
    from pycoll import _native

    file = _native.gpu_library()
    if file is None:
        text = "built without its CUDA part: tensors must be on the CPU"
        return Finding("pycoll", State.info, text)
    try:
        problem = _native.gpu_problem()
    except ImportError as error:  # no torch, or no module for it: `build` says so, too
        problem = str(error)
    if not problem:
        return Finding("pycoll", State.ok, f"{file.name} is open: CUDA tensors are served")
    advice = f"CPU tensors can do without it; to build it again: {REBUILD}"
    return Finding("pycoll", State.missing, f"{file.name} is not in use: {problem}", advice)


def cuda_driver() -> str:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none (libcuda.so.1 is not there)"
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return "libcuda.so.1 is there but does not tell its version"
    return f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def network() -> list[Finding]:
    interfaces = machine.interfaces()
    chosen = machine.choose_interface(interfaces)
    findings = [
        Finding(name, State.info, ", ".join(addresses) or "no address")
        for name, addresses in interfaces.items()
    ]
    state = State.ok if chosen.name else State.missing
    findings.append(Finding("chosen", state, chosen.name or "none", chosen.reason))
    return findings


def environment() -> list[Finding]:
    """Variables of pycoll: those that are known, and those that are set but unknown."""
    known = {finding.name: finding for finding in native_variables()}
    text = f"{os.environ.get('PYCOLL_TORCH', '1')}: 0 keeps `import pycoll` from importing torch"
    known["PYCOLL_TORCH"] = Finding("PYCOLL_TORCH", State.info, text)
    if os.environ.get("PYCOLL_TABLE") and core() is not None:
        known["PYCOLL_TABLE"] = selection_table(os.environ["PYCOLL_TABLE"])
    unknown = [
        Finding(name, State.missing, f"{value!r}: pycoll reads no such variable", "check spelling")
        for name, value in sorted(os.environ.items())
        if name.startswith("PYCOLL_") and name not in known
    ]
    return [*known.values(), *unknown]


def selection_table(file: str) -> Finding:
    """Whether groups can be made with it."""
    from pycoll.selection import Table

    try:
        rules = Table.load(file).rules
    except ValueError as error:
        advice = "no group can be made with it: make a new one with `pycoll tune`"
        return Finding("PYCOLL_TABLE", State.missing, str(error), advice)
    text = f"{file}: {len(rules)} rules; the same on every rank"
    return Finding("PYCOLL_TABLE", State.ok, text)


def native_variables() -> list[Finding]:
    """The native core's variables; a value that it refuses is a finding with its reason."""
    module = core()
    if module is None or not hasattr(module, "config_variables"):
        return []
    try:
        rows = module.config_variables()
    except module.Error as error:
        # The message names the variable, its value and what is allowed.
        refused = next((n for n in os.environ if n.startswith("PYCOLL_") and n in str(error)), "")
        return [Finding(refused or "variables", State.missing, str(error))]
    findings = []
    for name, value, default, doc, agreed in rows:
        text = value or "not set"
        if value != default:
            text += f" (default: {default or 'not set'})"
        text += f": {doc}" + ("; the same on all ranks" if agreed else "")
        findings.append(Finding(name, State.info, text))
    return findings


def ranges(numbers: Iterable[int]) -> str:
    """ "0-3,8" for [0, 1, 2, 3, 8]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "build": build,
    "transports": transports,
    "shareable memory": shareable_memory,
    "processors": processors,
    "CUDA": cuda,
    "network": network,
    "environment": environment,
}
