"""What pycoll's bootstrap needs of a store, over the stores there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

from pycoll import _core

# Seconds. A store without check() is asked by a get() that waits: long enough for the answer of a
# distant one, short enough to be asked once a second.
PEEK_WITHOUT_CHECK = 0.2
# For a key that is there: as long as a slow store may take.
FETCH = 5.0


class BootstrapStore(Protocol):
    """set, get that waits and returns None when the key did not come, peek that asks once, and
    remove (best effort)."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout: float) -> bytes | None: ...
    def peek(self, key: str) -> bytes | None: ...
    def remove(self, key: str) -> None: ...


@contextlib.contextmanager
def _errors_are_ours() -> Iterator[None]:
    """What the system refuses a store (descriptors, space) is an error of making the group."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        if isinstance(error, _core.Error):
            raise
        raise _core.OperatingSystemError(f"the store failed: {error}") from error


class _AnyStore:
    """Over pycoll.FileStore and whatever has ``set(key, bytes)`` and ``get(key, timeout=s)``."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        with _errors_are_ours():
            self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        try:
            with _errors_are_ours():
                return bytes(self._store.get(key, timeout=timeout))
        except TimeoutError:
            return None

    def peek(self, key: str) -> bytes | None:
        try:
            there = self._store.check([key])
        except Exception:  # it has none, or one of its own kind
            return self.get(key, PEEK_WITHOUT_CHECK)
        return self.get(key, FETCH) if there else None

    def remove(self, key: str) -> None:
        delete = getattr(self._store, "delete_key", None)
        if delete is not None:
            with contextlib.suppress(Exception):  # a store that cannot delete keeps the key
                delete(key)


class _TorchStore(_AnyStore):
    """Over torch.distributed.Store, whose get() waits for the store's own timeout."""

    def get(self, key: str, timeout: float) -> bytes | None:
        try:
            self._store.wait([key], timedelta(seconds=max(timeout, 0.001)))
        except (
            RuntimeError
        ) as error:  # torch.distributed.DistStoreError, by text since it has no code
            if "timeout" in str(error).lower():
                return None
            raise
        return bytes(self._store.get(key))


def adapt_store(store: Any) -> BootstrapStore:
    """Wraps a torch Store, a pycoll.FileStore, or an object with the same methods."""
    if hasattr(store, "wait") and hasattr(store, "set_timeout"):
        return _TorchStore(store)
    if not (callable(getattr(store, "set", None)) and callable(getattr(store, "get", None))):
        raise _core.InvalidArgumentError(
            "store is a pycoll.FileStore(directory), a torch.distributed Store or an object with "
            f"set() and get(), not {store!r}"
        )
    return _AnyStore(store)
