"""Gradient reduction and communication over the ranks of a job, on NumPy arrays and DLPack tensors.

Importing this package loads nothing: no MPI, CUDA, TensorFlow, NumPy or native code. Names are
resolved at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradred.basics import (
        cross_rank,
        cross_size,
        describe,
        init,
        is_homogeneous,
        is_initialized,
        join,
        local_rank,
        local_size,
        plan,
        rank,
        save_plan,
        shutdown,
        size,
    )
    from gradred.collectives import (
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        reducescatter,
    )
    from gradred.counters import Metrics, metrics
    from gradred.errors import (
        Abandoned,
        Error,
        Internal,
        InvalidArgument,
        Mismatch,
        NotInitialized,
        PeerLost,
        Timeout,
        TransportError,
        Unsupported,
    )
    from gradred.objects import allgather_object, broadcast_object
    from gradred.process_sets import (
        ProcessSet,
        add_process_set,
        global_process_set,
        remove_process_set,
    )
    from gradred.reduce_ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
    from gradred.timeline import start_timeline, stop_timeline

__version__ = "0.1.0"

_HOMES = {
    "basics": (
        "cross_rank cross_size describe init is_homogeneous is_initialized join local_rank "
        "local_size plan rank save_plan shutdown size"
    ),
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
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "describe",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "plan",
    "rank",
    "reducescatter",
    "remove_process_set",
    "save_plan",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'gradred' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gradred.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
