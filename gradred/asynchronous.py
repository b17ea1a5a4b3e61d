"""Collectives on arrays that return at once: the caller computes, and waits for them later.

Each takes what the function of the same name without ``_async`` takes (see ``gradred.collectives``)
and returns a ``Handle`` with its result. Arguments are checked before it returns; what ranks
disagree on is raised by ``Handle.wait``. Several calls may be in flight, also of one name: the k-th
belongs to the k-th on the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradred.calls import Call, Handle, Result
from gradred.collectives import copying, exchange, gathering, know, known, reduction
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp

__all__ = [
    "allgather_async",
    "allreduce_async",
    "alltoall_async",
    "broadcast_async",
    "grouped_allreduce_async",
    "reducescatter_async",
]


def allreduce_async(
    array: Any,
    op: ReduceOp | int = ReduceOp.Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    wire: str | None = None,
    out: np.ndarray | None = None,
) -> Handle[np.ndarray]:
    """Starts an ``allreduce``. Collective; does not wait."""
    factors = (prescale_factor, postscale_factor)
    key, spec = known(array, op, name, factors, process_set, wire)
    if spec is not None and (batch := spec.start(array, out)) is not None:
        return Handle(batch, _first if out is None else lambda results: out)
    call = reduction("allreduce", [array], op, name, factors, process_set, wire, out)
    handle = _only(call).start()
    know(key, array, call)
    return handle


def grouped_allreduce_async(
    arrays: Sequence[Any],
    op: ReduceOp | int = ReduceOp.Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    wire: str | None = None,
) -> Handle[list[np.ndarray]]:
    """Starts a ``grouped_allreduce``. Collective; does not wait."""
    factors = (prescale_factor, postscale_factor)
    return reduction("grouped_allreduce", arrays, op, name, factors, process_set, wire).start()


def reducescatter_async(
    array: Any,
    op: ReduceOp | int = ReduceOp.Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    wire: str | None = None,
) -> Handle[np.ndarray]:
    """Starts a ``reducescatter``. Collective; does not wait."""
    factors = (prescale_factor, postscale_factor)
    return _only(reduction("reducescatter", [array], op, name, factors, process_set, wire)).start()


def allgather_async(
    array: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Handle[np.ndarray]:
    """Starts an ``allgather``. Collective; does not wait."""
    return _only(gathering("allgather", [array], name, process_set)).start()


def alltoall_async(
    array: Any,
    splits: Sequence[int] | np.ndarray | None = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts an ``alltoall``. Collective; does not wait."""
    return exchange(array, splits, name, process_set).start()


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Handle[np.ndarray]:
    """Starts a ``broadcast``. Collective; does not wait."""
    return copying(array, root_rank, name, process_set).start()


def _first(results: list[Result]) -> np.ndarray:
    [(array, _, _)] = results
    assert array is not None  # a reduction has an output
    return array


def _only(call: Call[list[np.ndarray]]) -> Call[np.ndarray]:
    """The call whose result is the only one of a list."""

    def result(results: list[Result]) -> np.ndarray:
        return call.result(results)[0]

    return Call(call.spec, call.inputs, result, call.outputs, call.splits)
