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
    from pycoll.codecs import codec_of
    from pycoll.options import Options

    native = _native.load()
    settings = Options.of(backend_options)
    variables, table = settings.resolve()
    return native.create_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),  # empty for the default group: all ranks
        variables,
        table,
        None if settings.codec is None else codec_of(settings.codec)._fields(),
        settings.least_bytes,
    )
