"""Collectives on picklable Python objects."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from gradred import basics
from gradred._native import core
from gradred.collectives import allgather, broadcast
from gradred.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str = "broadcast_object",
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of root_rank, on all ranks of the process set; root_rank gets its own one back.

    obj: picklable; ignored elsewhere. Collective. Unpickling runs code: the ranks trust each other.
    With GRADRED_NULL each rank gets its own one back. Raises: see ``broadcast``.
    """
    mine = core.rank() == root_rank
    data = np.frombuffer(pickle.dumps(obj) if mine else b"", np.uint8)
    size = broadcast(np.int64(data.size), root_rank, f"{name}.size", process_set=process_set)
    if basics.settings().null:
        return obj
    if not mine:
        data = np.zeros(int(size), np.uint8)
    data = broadcast(data, root_rank, f"{name}.data", process_set=process_set)
    return obj if mine else pickle.loads(data.tobytes())


def allgather_object(
    obj: Any, name: str = "allgather_object", *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of the process set, in the order of ranks.

    obj: picklable. Collective. Unpickling runs code: the ranks trust each other. With GRADRED_NULL
    this rank's own alone. Raises: see ``allgather``.
    """
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    sizes = allgather(np.array([data.size], np.int64), f"{name}.sizes", process_set=process_set)
    everything = allgather(data, f"{name}.data", process_set=process_set)
    ends = np.cumsum(sizes)
    return [
        pickle.loads(everything[end - size : end].tobytes())
        for size, end in zip(sizes, ends, strict=True)
    ]
