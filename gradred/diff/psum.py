"""Psum and replicate: from per-rank to replicated values and back, each other's adjoint.

A value is replicated if all ranks hold the same and mean the same by it: parameters of a model,
losses summed over ranks. Its cotangent is replicated too. See docs/diff.md.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, operation, run

__all__ = ["psum", "replicate"]


@operation
def psum(x: Any, context: Context, name: str | None = None) -> tf.Tensor:
    """The sum of all ranks' values as one replicated value. Collective; differentiable.

    x: a tensor of the same shape and dtype on all ranks. The adjoint is ``replicate``: each rank's
    gradient is the derivative of the one value that all compute from the result.
    """
    x = as_tensor(x, "psum")
    [y] = run(context, "psum", [x], params=[0], name=name)
    return y


@operation
def replicate(x: Any, context: Context, name: str | None = None) -> tf.Tensor:
    """A replicated value for use on each rank with data of its own. Differentiable.

    x: equal on all ranks, which is not checked (``check_replicated`` does). Sends nothing; the
    adjoint is ``psum``: the gradient of a parameter is the sum of what all ranks used it for.
    """
    x = as_tensor(x, "replicate")
    [y] = run(context, "replicate", [x], name=name)
    return y


@adjoint_of("psum", "")
def _adjoint_of_psum(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    return [replicate(cotangent, node.context)]


@adjoint_of("replicate", "psum", lambda _: ())
def _adjoint_of_replicate(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    return [psum(cotangent, node.context)]
