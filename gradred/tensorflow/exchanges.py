"""Collectives in which rows change hands: allgather, alltoall, reducescatter; with gradients.

All are collective over the process set and differentiable any number of times: gradients are the
adjoints. In eager mode they wait and raise gradred's errors; in a graph they raise TensorFlow's
when it runs (see docs/errors.md), with the same texts. ``ignore_name_scope`` and ``device_dense``
are there for Horovod's scripts and mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from gradred import basics
from gradred.arrays import as_list
from gradred.compression import wire_of
from gradred.errors import InvalidArgument
from gradred.process_sets import ProcessSet, global_process_set, member_of
from gradred.reduce_ops import ReduceOp, checked_factors, native_name
from gradred.tensorflow import differentiable, graph
from gradred.tensorflow.graph import plain_python
from gradred.tensorflow.tensors import as_reducible, as_rows, as_tensor, movable

__all__ = ["allgather", "alltoall", "grouped_allgather", "grouped_reducescatter", "reducescatter"]


@plain_python
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The ranks' tensors one after the other along the first dimension. Collective; differentiable.

    tensor: at least one dimension; the first may differ between ranks (also be 0), the others must
    agree. dtypes: those of ``allreduce``, and complex64.

    Returns: a tensor of shape [sum of first dimensions, ...], equal on all ranks.

    The gradient is this rank's part of the sum of the ranks' cotangents. Raises: see ``allreduce``;
    InvalidArgument also for a scalar.
    """
    return _allgather("allgather", [tensor], name, process_set)[0]


@plain_python
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``allgather`` of a list as one group: all or none. Shapes and dtypes may be mixed.

    The list must have the same length and dtypes on all ranks, and the same shapes but for the
    first dimensions.
    """
    return _allgather("grouped_allgather", tensors, name, process_set)


@plain_python
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank a part of the rows; returns the parts from all. Collective; differentiable.

    tensor: at least one dimension; the first may differ between ranks (also be 0), the others must
    agree. dtypes: see ``allgather``. splits: how many rows go to each rank of the set, in their
    order, the first rows to the first rank: int32 or int64, one number a rank, with the first
    dimension as their sum. None: equal parts, and the first dimension is a multiple of the number
    of ranks. Ranks may differ in giving splits.

    Returns: a tensor of shape [sum of the rows received, ...], in the order of ranks; with splits a
    pair of it and the number of rows from each rank, of splits' dtype.

    The gradient is an alltoall back of the parts received. Raises: see ``allreduce``;
    InvalidArgument also for a scalar, and for splits that do not fit: the other ranks then get
    Abandoned.
    """
    number = member_of(process_set, "alltoall")
    domain = graph.domain_name("alltoall", name, process_set)
    what = f"alltoall of '{domain}'"
    moved, restore = movable(as_rows(as_tensor(tensor, what), what), what)
    counts = None if splits is None else _splits(splits, what, number)
    parts = None if counts is None else tf.cast(counts, tf.int64)
    rows, received = differentiable.alltoall(moved, parts, domain, process_set)
    if counts is None:
        return restore(rows)
    received = tf.cast(tf.ensure_shape(received, [process_set.size()]), counts.dtype)
    return restore(rows), received


@plain_python
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = None,
    op: ReduceOp | int = ReduceOp.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor and leaves each rank its part of the rows. Collective; differentiable.

    tensor: at least one dimension, the same shape and dtype on all ranks. Its first dimension, of
    any length, is spread over the ranks as evenly as can be, in their order; the lower ones get one
    row more. dtypes, op, factors and compression: see ``allreduce``.

    Returns: this rank's rows of the reduced tensor, [rows / ranks (maybe + 1), ...].

    The gradient of Sum and Average is the adjoint: an allgather of the cotangents, scaled. Raises:
    see ``allreduce``; InvalidArgument also for a scalar; Unsupported for gradients of other ops.
    """
    factors = (prescale_factor, postscale_factor)
    return _reducescatter("reducescatter", [tensor], compression, op, name, process_set, factors)[0]


@plain_python
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = None,
    op: ReduceOp | int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """``reducescatter`` of a list as one group: all or none. Shapes and dtypes may be mixed.

    The list must have the same length, shapes and dtypes on all ranks.
    """
    factors = (prescale_factor, postscale_factor)
    return _reducescatter(
        "grouped_reducescatter", tensors, compression, op, name, process_set, factors
    )


def _allgather(
    kind: str, tensors: Sequence[Any], name: str | None, process_set: ProcessSet
) -> list[tf.Tensor]:
    member_of(process_set, kind)
    domain = graph.domain_name(kind, name, process_set)
    what = f"{kind} of '{domain}'"
    tensors = as_list(tensors, what)
    if not tensors:
        return []
    moved = [movable(as_rows(as_tensor(tensor, what), what), what) for tensor in tensors]
    gathered = differentiable.allgather([x for x, _ in moved], domain, process_set)
    return [restore(x) for (_, restore), x in zip(moved, gathered, strict=True)]


def _reducescatter(
    kind: str,
    tensors: Sequence[Any],
    compression: Any,
    op: ReduceOp | int,
    name: str | None,
    process_set: ProcessSet,
    factors: tuple[float, float],
) -> list[tf.Tensor]:
    reduce_op = native_name(op, kind)
    scales = checked_factors(*factors, kind)
    member_of(process_set, kind)
    wire = wire_of(compression, basics.settings().wire, kind)
    domain = graph.domain_name(kind, name, process_set)
    what = f"{kind} of '{domain}'"
    tensors = as_list(tensors, what)
    if not tensors:
        return []
    rows = [as_rows(as_reducible(tensor, what), what) for tensor in tensors]
    return differentiable.reducescatter(rows, reduce_op, wire, scales, domain, process_set)


def _splits(splits: Any, what: str, process_set: int) -> tf.Tensor:
    """A vector of int32 or int64. That the numbers fit is for the kernel to see."""
    if isinstance(splits, list | tuple) and not splits:
        splits = tf.zeros([0], tf.int32)  # TensorFlow would take float32
    numbers = as_tensor(splits, what)
    if numbers.dtype not in (tf.int32, tf.int64) or numbers.shape.rank not in (None, 1):
        raise InvalidArgument(
            f"{what}: rank {basics.rank()} in process set {process_set}: expected as splits a "
            f"vector of int32 or int64, got {numbers.dtype.name} {numbers.shape}"
        )
    return numbers
