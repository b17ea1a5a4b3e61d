"""Who is who, as tensors: asked when a graph runs, not when it is traced. Local."""

from __future__ import annotations

import tensorflow as tf
from gradred.tensorflow import graph
from gradred.tensorflow.native import native_errors, ops

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Number of ranks of a process set: int32, scalar. Local.

    Raises, when it runs: InvalidArgument for a set that is not known; NotInitialized.
    """
    return _ask("size", name, process_set_id)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Number of ranks of this node: int32, scalar. Local."""
    return _ask("local_size", name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank: int32, scalar. Local."""
    return _ask("rank", name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank among those of its node: int32, scalar. Local."""
    return _ask("local_rank", name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in a process set, else 0: int32, scalar. Local. Raises: see ``size_op``."""
    return _ask("included", name, process_set_id)


def _ask(what: str, name: str | None, process_set: int = 0) -> tf.Tensor:
    graph.refuse_xla(f"the op of '{what}'")
    with native_errors():
        value = ops.gradred_world(what=what, process_set=process_set, name=name)
    if not tf.executing_eagerly():
        graph.run_independently(value.op)
    return value
