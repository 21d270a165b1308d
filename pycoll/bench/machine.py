"""Facts about the machine that decide how far figures of two runs can be compared."""

from __future__ import annotations

import os
from pathlib import Path

from pycoll.bench.units import parse_size

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE = 32 << 20


def machine() -> dict[str, object]:
    """Facts that decide how far figures of two runs can be compared (mostly: not at all)."""
    import torch

    import pycoll
    from pycoll.cli.machine import cgroup_cpus, cpu_model

    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "quota": cgroup_cpus(),
        # Other work on the machine shows here; the benchmark has not begun yet.
        "load": os.getloadavg()[0],
        "kernel": os.uname().release,
        "torch": torch.__version__,
        "pycoll": pycoll.__version__,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PYCOLL_")},
    }


def machine_lines(facts: dict[str, object]) -> list[str]:
    quota = f", quota {facts['quota']:g} CPUs" if facts["quota"] else ""
    environment = facts["environment"]
    assert isinstance(environment, dict)
    settings = " ".join(f"{name}={value}" for name, value in environment.items())
    return [
        f"machine   {facts['cpu']}, {facts['cores']} cores{quota}, Linux {facts['kernel']}, "
        f"load {facts['load']:.1f} before the run",
        f"versions  torch {facts['torch']}, pycoll {facts['pycoll']}"
        + (f", with {settings}" if settings else ""),
    ]


def last_level_cache() -> int:
    """Bytes of the largest cache of the first CPU, as the kernel tells; a usual size if not."""
    sizes = [USUAL_CACHE]
    for file in CACHES.glob("index*/size"):
        try:
            sizes.append(parse_size(file.read_text()))
        except (OSError, ValueError):
            continue  # a virtual machine may tell of no cache, or of one without a size
    return max(sizes)
