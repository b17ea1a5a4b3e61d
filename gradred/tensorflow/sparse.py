"""Reducing gradients that are tf.IndexedSlices, as the rows that any rank has touched.

Each rank sums rows that it has several times. How many rows each has travels with the dense
gradients, as a vector of ``counts``; from its sum all ranks see alike what moves less: gathering
all rows, or a reduction of the whole variable. The result has each row once, either way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from gradred.errors import Unsupported
from gradred.process_sets import ProcessSet
from gradred.tensorflow import differentiable, graph
from gradred.tensorflow.guard import mark_reduced
from gradred.tensorflow.ops import Member, declare, run_members

__all__ = ["COUNTS", "Slices", "slices_of"]

COUNTS = 4  # elements of ``Slices.counts``

_INDEX_NBYTES = 8  # of the larger dtype: where ranks have both, they choose alike all the same

# Variables whose gradients have been sparse, by id, and the dtype of the indices: a None in their
# place stands for no rows.
_variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_index_dtypes: dict[int, tf.DType] = {}


@dataclass(frozen=True)
class Slices:
    """This rank's rows of one gradient, each once, and what is known of the whole."""

    values: tf.Tensor
    indices: tf.Tensor
    counts: tf.Tensor  # int64: rows; elements infinite on the wire alone; 1; 0 for a None, else 1
    rows: int | tf.Tensor  # of the variable
    shape: Any  # of the variable: a vector

    def reduce(
        self, counts: tf.Tensor, member: Member, name: str, process_set: ProcessSet
    ) -> tf.IndexedSlices:
        """The ranks' rows, summed or averaged. Collective.

        counts: the sum of the ranks' ``counts``. member: how the dense gradient would travel.
        """
        total, lost, ranks, _ = tf.unstack(counts)
        wire = tf.as_dtype(member.wire)
        width = 1
        for d in self.values.shape[1:]:
            width *= d
        row_nbytes = width * wire.size
        # A rank that has joined brings nothing and cannot gather. What overflows is counted by the
        # native core where it casts.
        whole = (
            (total * (row_nbytes + _INDEX_NBYTES) >= self.rows * (row_nbytes + 1))
            | (lost > 0)
            | (ranks < process_set.size())
        )
        values, indices = _choose(
            whole,
            lambda: self._reduce_whole(member, name, process_set),
            lambda: self._gather(member, name, process_set),
        )
        values.set_shape([None, *self.values.shape[1:]])
        return tf.IndexedSlices(mark_reduced(values, name), indices, self.shape)

    def _gather(self, member: Member, name: str, process_set: ProcessSet) -> list[tf.Tensor]:
        wire, dtype = tf.as_dtype(member.wire), self.values.dtype
        values, indices = differentiable.gather(
            [tf.cast(self.values, wire), self.indices], graph.unique(f"{name}.rows"), process_set
        )
        values = tf.cast(values, dtype)
        if member.reduce_op == "average":
            values *= tf.constant(1.0 / process_set.size(), dtype)
        return _summed(values, indices)

    def _reduce_whole(self, member: Member, name: str, process_set: ProcessSet) -> list[tf.Tensor]:
        domain = graph.unique(f"{name}.whole")
        members = [
            member,
            Member(f"{member.label} rows", "allreduce", "uint8", "uint8", (-1,), "max"),
        ]
        rows = tf.cast(self.rows, tf.int32)
        values = tf.math.unsorted_segment_sum(self.values, self.indices, rows)
        ones = tf.ones(tf.shape(self.indices), tf.int32)
        touched = tf.cast(tf.math.unsorted_segment_sum(ones, self.indices, rows) > 0, tf.uint8)
        number = process_set.require_member(name)
        reduced, _ = run_members(declare(domain, members, [], number), [values, touched])
        indices = tf.cast(tf.where(reduced[1] > 0)[:, 0], self.indices.dtype)
        return [tf.gather(reduced[0], indices), indices]


def slices_of(gradient: tf.IndexedSlices | None, variable: Any, member: Member) -> Slices | None:
    """The rows of a gradient; None for a None, unless the variable has had a sparse gradient.

    member: how the dense gradient would travel. Raises Unsupported for reductions other than Sum
    and Average.
    """
    key = id(variable)
    shape: Any = None
    if gradient is None:
        if key not in _variables or _variables[key] is not variable:
            return None
        indices = tf.zeros([0], _index_dtypes[key])
        values = tf.zeros([0, *variable.shape[1:]], member.dtype)
    else:
        _variables[key] = variable
        _index_dtypes[key] = gradient.indices.dtype
        values, indices = _summed(gradient.values, gradient.indices)
        values.set_shape([None, *variable.shape[1:]])
        shape = gradient.dense_shape
    if member.reduce_op not in ("sum", "average"):
        raise Unsupported(
            f"'{member.label}': {member.reduce_op} of tf.IndexedSlices: expected Sum or Average; "
            "sparse_as_dense=True makes them dense"
        )
    lost = tf.constant(0, tf.int64)
    if member.wire != member.dtype:
        cast = tf.cast(values, member.wire)
        lost = tf.math.count_nonzero(tf.math.is_finite(values) & ~tf.math.is_finite(cast))
    one, brought = tf.constant(1, tf.int64), tf.constant(gradient is not None, tf.int64)
    counts = tf.stack([tf.shape(indices, tf.int64)[0], lost, one, brought])
    rows: int | None = variable.shape[0]
    return Slices(
        values=values,
        indices=indices,
        counts=counts,
        rows=tf.shape(variable, tf.int64)[0] if rows is None else rows,
        shape=tf.shape(variable) if shape is None else shape,
    )


def _summed(values: tf.Tensor, indices: tf.Tensor) -> list[tf.Tensor]:
    """Each row once."""
    rows, places = tf.unique(indices)
    return [tf.math.unsorted_segment_sum(values, places, tf.shape(rows)[0]), rows]


def _choose(
    condition: tf.Tensor,
    yes: Callable[[], list[tf.Tensor]],
    no: Callable[[], list[tf.Tensor]],
) -> list[tf.Tensor]:
    if tf.executing_eagerly():
        return yes() if bool(condition) else no()
    return list(tf.cond(condition, yes, no))
