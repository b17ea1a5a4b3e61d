"""Scan: sums over this rank and those before it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, operation, run

__all__ = ["scan"]


@operation
def scan(x: Any, context: Context, reverse: bool = False, name: str | None = None) -> tf.Tensor:
    """The sum of the values of ranks 0 to this one. Collective over the context; differentiable.

    x: of the same shape and dtype on all ranks. reverse: of this rank to the last: the adjoint.
    """
    x = as_tensor(x, "scan")
    [y] = run(context, "scan", [x], params=[-1 if reverse else 1], name=name)
    return y


def _peers(node: Node) -> list[int]:
    rank, size = node.context.rank, node.context.size
    steps = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    return [r for step in steps for r in (rank - step, rank + step) if 0 <= r < size]


@adjoint_of("scan", "scan", _peers)
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    return [scan(cotangent, node.context, reverse=node.params[0] > 0)]
