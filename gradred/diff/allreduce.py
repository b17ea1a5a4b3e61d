"""Allreduce: the sum, mean, minimum, maximum or product of all ranks' values, on every rank."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf
from gradred.diff.allgather import allgather
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, operation, run
from gradred.errors import InvalidArgument

__all__ = ["allreduce"]

# As in reduce::ReduceOp of native/src/reduce/layout.h.
_OPS = {"sum": 0, "min": 1, "max": 2, "product": 3, "mean": 4}
_NAMES = {number: name for name, number in _OPS.items()}


@operation
def allreduce(
    x: Any,
    context: Context,
    op: Literal["sum", "mean", "min", "max", "product"] = "sum",
    name: str | None = None,
) -> tf.Tensor:
    """The reduced values, on every rank. Collective over the context; differentiable.

    x: a tensor of the same shape and dtype on all ranks. The adjoint of a sum or mean is the same
    allreduce of the cotangents: losses of the ranks add. Where every rank computes the same loss
    from the result, that is as many times the gradient as there are ranks: use ``psum`` then. Of a
    minimum or maximum, ranks that hold it share the cotangent equally. float16 and bfloat16 are
    added in float32 and rounded; a mean of them does not overflow.

    Raises: InvalidArgument: another op, a mean of integers; Mismatch: ranks differ.
    """
    if op not in _OPS:
        raise InvalidArgument(f"allreduce: op={op!r}: expected one of {', '.join(_OPS)}")
    x = as_tensor(x, "allreduce")
    [y] = run(context, "allreduce", [x], params=[_OPS[op]], name=name)
    return y


@adjoint_of("allreduce", "allreduce")
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    context, op = node.context, _NAMES[node.params[0]]
    if op in ("sum", "mean"):
        return [allreduce(cotangent, context, "mean" if op == "mean" else "sum")]
    total = allreduce(cotangent, context)
    [x], [y] = node.inputs, node.outputs
    if op == "product":
        return [total * _product_of_others(x, context)]
    held = tf.cast(tf.equal(x, y), x.dtype)
    return [total * tf.math.divide_no_nan(held, allreduce(held, context))]


def _product_of_others(x: tf.Tensor, context: Context) -> tf.Tensor:
    """Which is not the product by the own value, where that is zero."""
    factors = allgather(x[tf.newaxis], context)
    rank = context.rank
    return tf.reduce_prod(tf.concat([factors[:rank], factors[rank + 1 :]], 0), 0)
