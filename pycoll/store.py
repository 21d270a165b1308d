"""A key-value store over a directory: how ranks find each other without torch.

It has the subset of `torch.distributed.Store` that pycoll uses, so either serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

DEFAULT_TIMEOUT = 300.0
# Polling: fine at first, since peers of one host are a few milliseconds apart, then rare.
FIRST_PAUSE = 0.0005
LONGEST_PAUSE = 0.05
# A file name may have 255 bytes; this leaves room for the prefix.
LONGEST_PLAIN_NAME = 200


class FileStore:
    """Key-value store for processes that share a directory (one host, or a shared file system).

    Each key is one file, written under a temporary name and renamed, so a reader sees a whole value
    or none. Use a directory of its own for each run: keys of an earlier run are still there.

    Args:
        path: the directory; made, with its parents, when it is missing.
        timeout: seconds that `get` waits by default.
    """

    def __init__(self, path: str | os.PathLike[str], timeout: float = DEFAULT_TIMEOUT) -> None:
        self.path = Path(path)
        self.timeout = timeout
        self.path.mkdir(parents=True, exist_ok=True)

    def set(self, key: str, value: bytes | str) -> None:
        """Stores `value` (text as UTF-8), replacing what was there."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        descriptor, temporary = tempfile.mkstemp(prefix="tmp-", dir=self.path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, self._file(key))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """The value of `key`, waiting up to `timeout` seconds (None: the store's) for it.

        Raises TimeoutError that names the key and the directory.
        """
        limit = self.timeout if timeout is None else timeout
        file = self._file(key)
        deadline = time.monotonic() + limit
        pause = FIRST_PAUSE
        while True:
            with contextlib.suppress(FileNotFoundError):
                return file.read_bytes()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(
                    f"FileStore: nobody set key {key!r} in {self.path} within {limit:g} s; "
                    "is every rank running, with the same directory?"
                )
            time.sleep(min(pause, remaining))
            pause = min(pause * 2, LONGEST_PAUSE)

    def check(self, keys: Iterable[str]) -> bool:
        """Whether every one of `keys` is set; does not wait."""
        return all(self._file(key).exists() for key in keys)

    def delete_key(self, key: str) -> bool:
        """Removes `key`; False when it was not set."""
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def _file(self, key: str) -> Path:
        # Different prefixes keep plain, hashed and temporary names apart.
        name = quote(key, safe="")
        if len(name) > LONGEST_PLAIN_NAME:
            return self.path / f"hash-{hashlib.sha256(key.encode()).hexdigest()}"
        return self.path / f"key-{name}"
