"""Scatter: the root's rows, divided among the ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.gather import _peers, gather
from gradred.diff.node import Node, adjoint_of, as_tensor, check_rank, operation, run
from gradred.diff.reduce_scatter import equal_rows
from gradred.tensorflow.tensors import as_rows

__all__ = ["scatter"]


@operation
def scatter(
    x: Any, context: Context, root: int = 0, rows: Any = None, name: str | None = None
) -> tf.Tensor:
    """This rank's rows of the root's ``x``. Collective over the context; differentiable.

    x: [all rows, ...] on the root; on the others its dtype and the further dimensions count, and
    without ``rows`` the number of rows. rows: how many this rank gets, behind those of the ranks
    before it; together all of the root's; None: equally many. The adjoint is ``gather``.
    """
    x = as_rows(as_tensor(x, "scatter"), "scatter")
    root = check_rank(root, context, "scatter")
    if rows is None:
        rows = equal_rows(x, context, "scatter")
    if context.rank != root:
        x = x[:0]
    known = tf.get_static_value(rows)
    shape = [None if known is None else int(known), *x.shape[1:]]
    [y] = run(
        context, "scatter", [x, tf.cast(rows, tf.int64)], params=[root], shapes=[shape], name=name
    )
    return y


@adjoint_of("scatter", "gather", _peers)
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor | None]:
    whole = gather(cotangent, node.context, node.params[0])
    return [tf.ensure_shape(whole, node.inputs[0].shape), None]
