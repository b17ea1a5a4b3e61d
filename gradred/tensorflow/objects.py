"""Collectives on Python objects, with Horovod's arguments. See gradred.objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradred import objects
from gradred.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn"]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of root_rank, on all ranks of the process set. Collective.

    obj: picklable; ignored elsewhere. session means nothing: the object travels at once, also where
    a graph is built. Raises: see gradred.broadcast_object.
    """
    return objects.broadcast_object(
        obj, root_rank, name or "broadcast_object", process_set=process_set
    )


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """``broadcast_object`` as a function of the object alone. Local; what it returns is not."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The objects of all ranks of the process set, in the order of ranks. Collective.

    obj: picklable. session means nothing. Raises: see gradred.allgather_object.
    """
    return objects.allgather_object(obj, name or "allgather_object", process_set=process_set)
