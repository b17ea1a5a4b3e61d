"""Barrier: no rank goes on before all have come."""

from __future__ import annotations

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, operation, run

__all__ = ["barrier"]


@operation
def barrier(context: Context, name: str | None = None) -> None:
    """Waits, at its place among the context's operations, for all ranks. Collective.

    Not repeated in the backward pass.
    """
    run(context, "barrier", [], dtypes=[], shapes=[], name=name)


@adjoint_of("barrier", "")
def _adjoint(node: Node) -> list[tf.Tensor]:
    return []
