"""Broadcast: the root's value on every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, check_rank, operation, run

__all__ = ["broadcast"]


@operation
def broadcast(x: Any, context: Context, root: int = 0, name: str | None = None) -> tf.Tensor:
    """The root's ``x``, on every rank. Collective over the context; differentiable.

    x: of the same shape and dtype on all ranks. The adjoint is ``reduce``: the root gets the sum of
    the cotangents, the others zeros.
    """
    x = as_tensor(x, "broadcast")
    [y] = run(context, "broadcast", [x], params=[check_rank(root, context, "broadcast")], name=name)
    return y


@adjoint_of("broadcast", "reduce")
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    from gradred.diff.reduce import reduce

    return [reduce(cotangent, node.context, node.params[0])]
