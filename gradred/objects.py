"""Collectives on picklable Python objects."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from gradred import basics
from gradred._native import core
from gradred.collectives import allgather, broadcast
from gradred.errors import Abandoned, InvalidArgument
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

    obj: picklable, of any size; ignored elsewhere. What pickle refuses, as functions that have no
    name, is left to cloudpickle if that is installed. Collective. Unpickling runs code: the ranks
    trust each other. With GRADRED_NULL each rank gets its own one back.

    Raises: InvalidArgument on the root for what cannot be pickled, Abandoned on the others then;
    see also ``broadcast``.
    """
    mine = core.rank() == root_rank
    data, reason = _pickled(obj) if mine else (np.zeros(0, np.uint8), "")
    size = broadcast(_signed_size(data, reason), root_rank, f"{name}.size", process_set=process_set)
    if basics.settings().null:
        return obj
    if not mine:
        data = np.zeros(abs(int(size)), np.uint8)
    data = broadcast(data, root_rank, f"{name}.data", process_set=process_set)
    if size < 0:
        _refuse(name, {root_rank: data.tobytes().decode()})
    return obj if mine else pickle.loads(data.tobytes())


def allgather_object(
    obj: Any, name: str = "allgather_object", *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of the process set, in the order of ranks.

    obj: picklable, see ``broadcast_object``. Collective. Unpickling runs code: the ranks trust each
    other. With GRADRED_NULL this rank's own alone.

    Raises: InvalidArgument where the own object cannot be pickled, Abandoned where another's
    cannot; see also ``allgather``.
    """
    data, reason = _pickled(obj)
    sizes = allgather(
        _signed_size(data, reason)[np.newaxis], f"{name}.sizes", process_set=process_set
    )
    everything = allgather(data, f"{name}.data", process_set=process_set)
    ends = np.cumsum(np.abs(sizes))
    parts = [
        everything[end - abs(size) : end].tobytes() for size, end in zip(sizes, ends, strict=True)
    ]
    failed = {
        rank: part.decode()
        for rank, size, part in zip(process_set.ranks, sizes, parts, strict=False)
        if size < 0
    }
    if failed:
        _refuse(name, failed)
    return [pickle.loads(part) for part in parts]


def _pickled(obj: Any) -> tuple[np.ndarray, str]:
    """The object's bytes; or those of the reason why there are none, and the reason."""
    try:
        return np.frombuffer(_dumps(obj), np.uint8), ""
    except Exception as error:
        reason = f"{type(obj).__name__}: {type(error).__name__}: {error}"[:1000]
        return np.frombuffer(reason.encode(errors="backslashreplace"), np.uint8), reason


def _dumps(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj)
    except Exception:
        try:
            import cloudpickle
        except ImportError:
            cloudpickle = None
        if cloudpickle is None:
            raise
        return bytes(cloudpickle.dumps(obj))


def _signed_size(data: np.ndarray, reason: str) -> np.ndarray:
    """Negative for a reason in an object's place."""
    return np.array(-data.size if reason else data.size, np.int64)


def _refuse(name: str, reasons: dict[int, str]) -> None:
    text = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
    kind = InvalidArgument if core.rank() in reasons else Abandoned
    raise kind(f"{name}: an object that cannot be pickled: {text}")
