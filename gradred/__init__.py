"""Gradient reduction and communication over the ranks of a job, on NumPy arrays and DLPack tensors.

Importing this package loads nothing: no MPI, CUDA, TensorFlow, NumPy or native code. Names are
resolved at their first use.
"""
# ruff: noqa: F403, F405 - for type checkers alone: __all__ says what is public

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradred.asynchronous import *
    from gradred.basics import *
    from gradred.calls import Handle, poll, synchronize
    from gradred.collectives import *
    from gradred.counters import *
    from gradred.errors import *
    from gradred.objects import *
    from gradred.process_sets import *
    from gradred.reduce_ops import *
    from gradred.timeline import *

__version__ = "0.1.0"

_HOMES = {
    "asynchronous": (
        "allgather_async allreduce_async alltoall_async broadcast_async grouped_allreduce_async "
        "reducescatter_async"
    ),
    "basics": (
        "cross_rank cross_size describe init is_homogeneous is_initialized join local_rank "
        "local_size plan rank save_plan shutdown size"
    ),
    "calls": "Handle poll synchronize",
    "collectives": (
        "allgather allreduce alltoall barrier broadcast grouped_allgather grouped_allreduce "
        "grouped_reducescatter reducescatter"
    ),
    "counters": "Metrics metrics",
    "errors": (
        "Abandoned Error Internal InvalidArgument Mismatch NotInitialized PeerLost Timeout "
        "TransportError Unsupported"
    ),
    "objects": "allgather_object broadcast_object",
    "process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "reduce_ops": "Adasum Average Max Min Product ReduceOp Sum",
    "timeline": "start_timeline stop_timeline",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Abandoned",
    "Adasum",
    "Average",
    "Error",
    "Handle",
    "Internal",
    "InvalidArgument",
    "Max",
    "Metrics",
    "Min",
    "Mismatch",
    "NotInitialized",
    "PeerLost",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "Timeout",
    "TransportError",
    "Unsupported",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "describe",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "plan",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "save_plan",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


if not TYPE_CHECKING:  # to a type checker other names do not exist

    def __getattr__(name: str) -> Any:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'gradred' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"gradred.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
