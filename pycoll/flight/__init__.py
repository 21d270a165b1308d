"""The flight recorder: what each group of a process has called lately, and what came of it.

Every process with a group keeps its last 1,024 collectives and 1,024 messages of each group, in a
memory file of its own (csrc/runtime/flight.h). `pycoll status` reads it from outside, also of a
rank that hangs or is stopped; a copy of it is a dump, for `pycoll doctor --dump`.
"""

from __future__ import annotations

from pycoll.flight.dump import dump_flight_records
from pycoll.flight.records import CallRecord, Group, MessageRecord, Process, parse

__all__ = ["CallRecord", "Group", "MessageRecord", "Process", "dump_flight_records", "parse"]
