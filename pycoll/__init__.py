"""pycoll: collective communication for training.

With torch: `import pycoll; torch.distributed.init_process_group("pycoll")`.
Without: `pycoll.Communicator(pycoll.FileStore(path), rank, world_size)` on NumPy arrays.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycoll._codec_choice import choose_codec, codec_choice
    from pycoll._core import (
        AbortedError,
        Error,
        InvalidArgumentError,
        MismatchError,
        OperatingSystemError,
        PeerError,
        TimeoutError,
        UnsupportedError,
    )
    from pycoll._regions import codec
    from pycoll._statistics import statistics
    from pycoll.auto import Auto
    from pycoll.codecs import (
        Bf16,
        Codec,
        Fp8E4M3,
        Fp8E5M2,
        Fp16,
        Int4,
        Int8,
        Sign,
        Ternary,
        UInt4,
        UInt8,
        codec_of,
        decode,
        encode,
    )
    from pycoll.communicator import Communicator, Work
    from pycoll.direct import all_reduce
    from pycoll.flight import dump_flight_records
    from pycoll.hooks import (
        CompressionState,
        OneBitAdam,
        PowerSGD,
        RandomK,
        TopK,
        compress_hook,
    )
    from pycoll.mixed_precision import Unscaled, cast_, clip_by_norm_, unscale_
    from pycoll.options import Options
    from pycoll.shared_memory import (
        empty,
        empty_array,
        is_shareable,
        share_,
        shareable,
        shared_memory_stats,
    )
    from pycoll.shrinking import shrink_group
    from pycoll.store import FileStore

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "Auto",
    "Bf16",
    "Codec",
    "Communicator",
    "CompressionState",
    "Error",
    "FileStore",
    "Fp8E4M3",
    "Fp8E5M2",
    "Fp16",
    "Int4",
    "Int8",
    "InvalidArgumentError",
    "MismatchError",
    "OneBitAdam",
    "OperatingSystemError",
    "Options",
    "PeerError",
    "PowerSGD",
    "RandomK",
    "Sign",
    "Ternary",
    "TimeoutError",
    "TopK",
    "UInt4",
    "UInt8",
    "Unscaled",
    "UnsupportedError",
    "Work",
    "__version__",
    "all_reduce",
    "cast_",
    "choose_codec",
    "clip_by_norm_",
    "codec",
    "codec_choice",
    "codec_of",
    "compress_hook",
    "decode",
    "dump_flight_records",
    "empty",
    "empty_array",
    "encode",
    "is_shareable",
    "share_",
    "shareable",
    "shared_memory_stats",
    "shrink_group",
    "statistics",
    "unscale_",
]

_HOMES = {
    "Auto": "auto",
    "Bf16": "codecs",
    "Codec": "codecs",
    "Fp16": "codecs",
    "Fp8E4M3": "codecs",
    "Fp8E5M2": "codecs",
    "Int4": "codecs",
    "Int8": "codecs",
    "Sign": "codecs",
    "Ternary": "codecs",
    "UInt4": "codecs",
    "UInt8": "codecs",
    "choose_codec": "_codec_choice",
    "codec": "_regions",
    "codec_choice": "_codec_choice",
    "codec_of": "codecs",
    "decode": "codecs",
    "encode": "codecs",
    "Unscaled": "mixed_precision",
    "cast_": "mixed_precision",
    "clip_by_norm_": "mixed_precision",
    "unscale_": "mixed_precision",
    "Communicator": "communicator",
    "Work": "communicator",
    "FileStore": "store",
    "Options": "options",
    "all_reduce": "direct",
    "dump_flight_records": "flight",
    "CompressionState": "hooks",
    "OneBitAdam": "hooks",
    "PowerSGD": "hooks",
    "RandomK": "hooks",
    "TopK": "hooks",
    "compress_hook": "hooks",
    "empty": "shared_memory",
    "empty_array": "shared_memory",
    "is_shareable": "shared_memory",
    "share_": "shared_memory",
    "shareable": "shared_memory",
    "shared_memory_stats": "shared_memory",
    "shrink_group": "shrinking",
    "statistics": "_statistics",
}


def __getattr__(name: str) -> Any:
    # On first use: `pycoll doctor` must start, and say why, when the native core does not load.
    if name not in __all__:
        raise AttributeError(f"module 'pycoll' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"pycoll.{_HOMES.get(name, '_core')}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "torch":
            raise ImportError(f"pycoll.{name} needs torch ({error})", name=error.name) from error
        raise ImportError(
            f"pycoll.{name} needs pycoll's native core, which does not load ({error}); "
            "`pycoll doctor` says more, `pip install --no-build-isolation .` builds it"
        ) from error
    globals()[name] = getattr(module, name)
    return globals()[name]


if os.environ.get("PYCOLL_TORCH", "1") != "0" and importlib.util.find_spec("torch") is not None:
    from pycoll._registration import register

    register()
    del register
    # Other values are refused, with an explanation, where a group is made.
    if os.environ.get("PYCOLL_SHARED_ALLOCATOR") == "1":
        try:
            from pycoll.shared_memory import serve_whole_process

            serve_whole_process()
            del serve_whole_process
        except ImportError as error:
            import warnings

            warnings.warn(f"PYCOLL_SHARED_ALLOCATOR=1 does nothing: {error}", stacklevel=2)
