"""A check, for debugging, that a value is equal on all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, operation, run

__all__ = ["check_replicated"]


@operation
def check_replicated(x: Any, context: Context, name: str | None = None) -> tf.Tensor:
    """``x``, if it has the same bits on all ranks. Collective over the context; differentiable.

    A few bytes travel. The gradient goes through as it is, and is not checked.

    Raises: Mismatch, on all ranks, with the ranks that hold another value than the first.
    """
    x = as_tensor(x, "check_replicated")
    [y] = run(context, "check_replicated", [x], name=name)
    return y


@adjoint_of("check_replicated", "")
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    return [cotangent]
