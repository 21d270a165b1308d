"""The torch.distributed side of pycoll: the creator that torch calls for each process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from _pycoll_autoload import register

__all__ = ["create", "register"]


def create(options: Any, backend_options: Any) -> Any:
    """Makes the c10d backend of one process group.

    `options` is torch's DistributedBackendOptions, `backend_options` what the caller gave as
    `pg_options`: `pycoll.Options`, or None for the defaults. Raises ImportError when there is no
    native module for the running torch, `InvalidArgumentError` for options of another kind, and the
    errors of `pycoll` when the ranks do not find each other.
    """
    from pycoll import _native
    from pycoll._codec_choice import choose_for_new_group, groups
    from pycoll._generation import key_prefix
    from pycoll.auto import Auto, Choice, asked_for
    from pycoll.codecs import Codec
    from pycoll.flight.dump import dump_on_signal
    from pycoll.options import Options

    native = _native.load()
    settings = Options.of(backend_options)
    variables, table = settings.resolve()
    dump_on_signal(variables)
    generation = key_prefix(options.store)

    def make(
        name: str, codec: Codec | None, min_bytes: int, agreed: Mapping[str, str] | None = None
    ) -> Any:
        return native.create_backend(
            options.store,
            options.group_rank,
            options.group_size,
            options.timeout,
            generation + name + _members(options.global_ranks_in_group),
            list(options.global_ranks_in_group),  # empty for the default group: all ranks
            variables,
            table,
            None if codec is None else codec._fields(),
            min_bytes,
            dict(agreed or {}),
        )

    name, given, least = options.group_id, asked_for(settings.codec), settings.least_bytes
    # Compared before anything is measured: one rank may have nothing to measure.
    backend = make(name, None if isinstance(given, Auto) else given, least, settings.agreed())
    choice = None
    if isinstance(given, Auto):
        choice = choose_for_new_group(name, variables, given, make)
        fields = None if choice.codec is None else choice.codec._fields()
        backend.set_codec(fields, max(choice.min_bytes, least))
    elif given is not None:
        choice = Choice(given, least, "the group's Options name it")
    groups.made(name, choice)
    return backend


def _members(ranks: Sequence[int]) -> str:
    """A part of the name of a group in the store. torch numbers its groups: where only members make
    a group, without saying so, several have one number."""
    text = ",".join(map(str, ranks))
    if len(text) > 60:
        text = f"{text[:40]}...{sha256(text.encode()).hexdigest()[:12]}"
    return f" of {text}" if text else ""
