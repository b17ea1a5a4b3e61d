"""Gather: all ranks' rows, on one rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, check_rank, operation, run
from gradred.tensorflow.tensors import as_rows

__all__ = ["gather"]


@operation
def gather(x: Any, context: Context, root: int = 0, name: str | None = None) -> tf.Tensor:
    """The ranks' rows on the root, no rows on the others. Collective; differentiable.

    x: [rows, ...]; the number of rows may differ between ranks. The adjoint is ``scatter``.
    """
    x = as_rows(as_tensor(x, "gather"), "gather")
    root = check_rank(root, context, "gather")
    rows = None if context.rank == root else 0
    [y] = run(context, "gather", [x], params=[root], shapes=[[rows, *x.shape[1:]]], name=name)
    return y


def _peers(node: Node) -> list[int]:
    root, context = node.params[0], node.context
    return [r for r in range(context.size) if r != root] if context.rank == root else [root]


@adjoint_of("gather", "scatter", _peers)
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    from gradred.diff.scatter import scatter

    [x] = node.inputs
    part = scatter(cotangent, node.context, node.params[0], tf.shape(x, tf.int64)[0])
    return [tf.ensure_shape(part, x.shape)]
