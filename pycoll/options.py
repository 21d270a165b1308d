"""What a caller may set for one group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pycoll import _core
from pycoll._arguments import whole
from pycoll.auto import Auto, asked_for, canonical_choice
from pycoll.codecs import Codec
from pycoll.selection import Row, Table

__all__ = ["Options"]

# Below, codes cost more time than they save on any link.
MIN_BYTES = 16384
LEVELS = ("ranks", "run", "algorithm")


@dataclass(frozen=True)
class Options:
    """Settings of one group, the same on every rank: ``pg_options`` of torch.distributed's
    ``init_process_group`` and ``new_group``, ``options`` of `pycoll.Communicator`.

    What is None comes from the environment. Raises `InvalidArgumentError` (a ValueError) that says
    what is allowed; ranks whose options differ raise `MismatchError` when the group is made.

    Attributes:
        determinism: which results have the same bits: "ranks": those of all ranks; "run": and those
            of every run with the same settings (the default); "algorithm": and those with any
            table, transport, kind of memory and placement of the ranks. See docs/semantics.md.
        table: a selection table, or the name of its JSON file (`pycoll.selection` has the format,
            `pycoll tune` writes one); "builtin" for none, whatever PYCOLL_TABLE says.
        algo: rules before the table's, in the grammar of PYCOLL_ALGO:
            ``"all_reduce=ring:0-1M,two_shot;broadcast=tree"``.
        variables: any other PYCOLL_* variable, for this group alone.
        codec: how floats of all_reduce and reduce_scatter travel in calls that name no codec, and
            are in no region that does (`pycoll.codec`): a name such as "int8", or an object such as
            ``pycoll.Int8(block=64)`` (pycoll.codecs has them); None: as they are. What is gathered
            and broadcast stays exact, and so do messages. "auto", or a ``pycoll.Auto(...)``: the
            group measures what pays on its network, once, and keeps to it (`pycoll.codec_choice`
            says what and why), for calls on CPU memory: those on GPUs travel as they are. As that
            depends on time, results may differ from run to run; with a `determinism` of "run" or
            "algorithm" it is refused.
        min_bytes: vectors and messages of fewer bytes travel as they are; None: 16384.
    """

    determinism: Literal["ranks", "run", "algorithm"] | None = None
    table: str | os.PathLike[str] | Table | None = None
    algo: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    codec: str | Codec | Auto | None = None
    min_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.determinism not in (None, *LEVELS):
            raise _core.InvalidArgumentError(
                f"determinism is one of {', '.join(map(repr, LEVELS))}, not {self.determinism!r}"
            )
        if not isinstance(self.table, str | os.PathLike | Table | None):
            raise _core.InvalidArgumentError(
                f"table is a pycoll.selection.Table or the name of a file, not {self.table!r}"
            )
        if not isinstance(self.algo, str | None):
            raise _core.InvalidArgumentError(
                f"algo is a text like 'all_reduce=ring', not {self.algo!r}"
            )
        if not isinstance(self.variables, Mapping):
            raise _core.InvalidArgumentError(
                f"variables is a dict of PYCOLL_* variables and texts, not {self.variables!r}"
            )
        if isinstance(asked_for(self.codec), Auto):
            self._check_auto()
        if self.min_bytes is not None:
            least = whole("Options: min_bytes", self.min_bytes, "a number of bytes from 0 on")
            object.__setattr__(self, "min_bytes", least)
        variables = dict(self.variables)
        if self.algo is not None:
            variables["PYCOLL_ALGO"] = self.algo
        for name, value in variables.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise _core.InvalidArgumentError(
                    f"options map names of PYCOLL_* variables to texts, not {name!r} to {value!r}"
                )
            _core.check_variable(name, value)

    def _check_auto(self) -> None:
        level = (
            self.determinism
            or self.variables.get("PYCOLL_DETERMINISM")
            or os.environ.get("PYCOLL_DETERMINISM")
        )
        if level in ("run", "algorithm"):
            raise _core.InvalidArgumentError(
                f"codec='auto' chooses by measured times, so results may differ from run to run: "
                f"determinism={level!r} cannot be had; name a codec, or let determinism be 'ranks'"
            )

    @property
    def least_bytes(self) -> int:
        """Of a vector that is compressed."""
        return MIN_BYTES if self.min_bytes is None else self.min_bytes

    def agreed(self) -> dict[str, str]:
        """What ranks compare when the group is made, beside variables and table."""
        return {
            "Options.codec": repr(canonical_choice(self.codec)),
            "Options.min_bytes": str(self.least_bytes),
        }

    @staticmethod
    def of(given: Any) -> Options:
        """What callers may pass: None, `Options`, or a dict of PYCOLL_* variables."""
        if given is None:
            return Options()
        if isinstance(given, Options):
            return given
        if isinstance(given, Mapping):
            return Options(variables=dict(given))
        raise _core.InvalidArgumentError(
            f"the options of a group are pycoll.Options(...), not {type(given).__name__}"
        )

    def resolve(self) -> tuple[dict[str, str], list[Row]]:
        """Variables and table rows as the core takes them. Reads the table's file."""
        variables = dict(self.variables)
        if self.determinism is not None:
            variables["PYCOLL_DETERMINISM"] = self.determinism
        if self.algo is not None:
            variables["PYCOLL_ALGO"] = self.algo
        if isinstance(self.table, Table):
            return variables, self.table.as_rows()
        file = self.table
        if file is None:
            file = variables.get("PYCOLL_TABLE", os.environ.get("PYCOLL_TABLE", ""))
        if file in ("", "builtin"):
            return variables, []
        return variables, Table.load(file).as_rows()
