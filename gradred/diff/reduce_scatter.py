"""Reduce-scatter: each rank's rows of the sum of all ranks' values."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.allgather import allgather
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, operation, run
from gradred.errors import InvalidArgument
from gradred.tensorflow.tensors import as_rows

__all__ = ["equal_rows", "reduce_scatter"]


@operation
def reduce_scatter(
    x: Any, context: Context, rows: Any = None, name: str | None = None
) -> tf.Tensor:
    """This rank's rows of the sum over ranks. Collective over the context; differentiable.

    x: [all rows, ...], of the same shape and dtype on all ranks. rows: how many of them are this
    rank's, behind those of the ranks before it; together all; None: equally many, which must
    divide. The adjoint is ``allgather``.
    """
    x = as_rows(as_tensor(x, "reduce_scatter"), "reduce_scatter")
    if rows is None:
        rows = equal_rows(x, context, "reduce_scatter")
    known = tf.get_static_value(rows)
    rows = tf.cast(rows, tf.int64)
    shape = [None if known is None else int(known), *x.shape[1:]]
    [y] = run(context, "reduce_scatter", [x, rows], shapes=[shape], name=name)
    return y


@adjoint_of("reduce_scatter", "allgather")
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor | None]:
    whole = allgather(cotangent, node.context)
    return [tf.ensure_shape(whole, node.inputs[0].shape), None]


def equal_rows(x: tf.Tensor, context: Context, operation: str) -> Any:
    """How many rows each rank gets of ``x``: a number, or a tensor where that is not known yet."""
    if x.shape[0] is None:
        return tf.shape(x, tf.int64)[0] // context.size
    if x.shape[0] % context.size:
        raise InvalidArgument(
            f"{operation} in context '{context.name}': {x.shape[0]} rows for {context.size} ranks: "
            "expected a multiple, or rows=, how many this rank gets"
        )
    return x.shape[0] // context.size
