"""Alltoall: rows from every rank to every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, operation, run
from gradred.diff.reduce_scatter import equal_rows
from gradred.tensorflow.tensors import as_rows

__all__ = ["alltoall"]


@operation
def alltoall(
    x: Any, context: Context, splits: Any = None, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows that the ranks have for this one, and how many came from each.

    x: [rows, ...], those for rank 0 first. splits: [ranks], how many go to each; None: equally
    many. Returns: [rows received, ...] in the order of ranks, and their numbers, int64 [ranks].
    Collective over the context; differentiable. The adjoint sends the cotangents back.
    """
    x = as_rows(as_tensor(x, "alltoall"), "alltoall")
    rows = None
    if splits is None:
        splits = tf.fill([context.size], tf.cast(equal_rows(x, context, "alltoall"), tf.int64))
    y, received = run(
        context,
        "alltoall",
        [x, tf.cast(splits, tf.int64)],
        dtypes=[x.dtype, tf.int64],
        shapes=[[rows, *x.shape[1:]], [context.size]],
        name=name,
    )
    return y, received


@adjoint_of("alltoall", "alltoall")
def _adjoint(node: Node, cotangent: tf.Tensor, _: Any) -> list[tf.Tensor | None]:
    back, _ = alltoall(cotangent, node.context, node.outputs[1])
    return [tf.ensure_shape(back, node.inputs[0].shape), None]
