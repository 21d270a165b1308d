"""Which generation of an elastic job this process belongs to, for the names of its keys in a store.

`torchrun --max-restarts` starts all ranks again when one has died, and gives them the same store,
that of its agent: it lives on, with what a rank that was killed while its group connected has left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any


def key_prefix(store: Any, environ: Mapping[str, str] = os.environ) -> str:
    """Comes before the names of groups; empty for every store but the agent's.

    Other stores may serve processes that torchrun has not started, or several jobs: their names
    must not depend on who started whom. With several agents only the run's id counts: theirs may
    have counted different numbers of restarts (a change of members is none).
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not _is_of_agent(store, environ):
        return ""
    prefix = f"elastic/{environ.get('TORCHELASTIC_RUN_ID', '')}/"
    if environ.get("GROUP_WORLD_SIZE") == "1":
        prefix += f"{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
    return prefix


def _is_of_agent(store: Any, environ: Mapping[str, str]) -> bool:
    dist = sys.modules.get("torch.distributed")
    if dist is None:  # a store of another kind, in a program without torch
        return False
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return False
    of_agent = (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"))
    return (store.host, str(store.port)) == of_agent
