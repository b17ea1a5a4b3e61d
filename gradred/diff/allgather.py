"""Allgather: all ranks' rows, on every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, operation, run
from gradred.tensorflow.tensors import as_rows

__all__ = ["allgather"]


@operation
def allgather(x: Any, context: Context, name: str | None = None) -> tf.Tensor:
    """The ranks' rows, one after the other, on every rank. Collective; differentiable.

    x: [rows, ...]; the number of rows may differ between ranks. The adjoint is ``reduce_scatter``:
    each rank gets its rows of the sum of the cotangents.
    """
    x = as_rows(as_tensor(x, "allgather"), "allgather")
    [y] = run(context, "allgather", [x], shapes=[[None, *x.shape[1:]]], name=name)
    return y


@adjoint_of("allgather", "reduce_scatter")
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    from gradred.diff.reduce_scatter import reduce_scatter

    [x] = node.inputs
    part = reduce_scatter(cotangent, node.context, tf.shape(x, tf.int64)[0])
    return [tf.ensure_shape(part, x.shape)]
