"""Reduce: the sum of all ranks' values, on one rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.broadcast import broadcast
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, check_rank, operation, run

__all__ = ["reduce"]


@operation
def reduce(x: Any, context: Context, root: int = 0, name: str | None = None) -> tf.Tensor:
    """The sum on the root, zeros on the others. Collective over the context; differentiable.

    x: of the same shape and dtype on all ranks. The adjoint is ``broadcast`` of the root's
    cotangent.
    """
    x = as_tensor(x, "reduce")
    [y] = run(context, "reduce", [x], params=[check_rank(root, context, "reduce")], name=name)
    return y


@adjoint_of("reduce", "broadcast")
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    return [broadcast(cotangent, node.context, node.params[0])]
