"""The torch.distributed side of pycoll: the creator that torch calls for each process group."""

from __future__ import annotations

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
    from pycoll.auto import Auto, Choice, asked_for
    from pycoll.codecs import Codec
    from pycoll.options import Options

    native = _native.load()
    settings = Options.of(backend_options)
    variables, table = settings.resolve()

    def make(name: str, codec: Codec | None, min_bytes: int) -> Any:
        return native.create_backend(
            options.store,
            options.group_rank,
            options.group_size,
            options.timeout,
            name,
            list(options.global_ranks_in_group),  # empty for the default group: all ranks
            variables,
            table,
            None if codec is None else codec._fields(),
            min_bytes,
        )

    choice = None
    given = asked_for(settings.codec)
    if given is not None:
        if isinstance(given, Auto):
            choice = choose_for_new_group(options.group_id, variables, given, make)
        else:
            choice = Choice(given, settings.least_bytes, "the group's Options name it")
    groups.made(options.group_id, choice)
    if choice is None:
        return make(options.group_id, None, settings.least_bytes)
    return make(options.group_id, choice.codec, max(choice.min_bytes, settings.least_bytes))
