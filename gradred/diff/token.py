"""Tokens: scalars without a meaning that go through all operations of a context, one after another.

TensorFlow orders what depends on data, and nothing else for sure: two operations that do not depend
on each other may run in one order on one rank and in the other on the next, and each would wait for
the other. So each operation takes the token of the one before it and gives one to the next. Its
adjoint does the same with the cotangent of the token, which makes the backward pass run in the
reverse order, in whatever graph it is built.

Two conditions. The last token must reach what is differentiated (``end``): or the adjoints of
operations whose results it does not need would not run, and peers would wait for them. The first
must depend on what is differentiated by (``begin``), for the same reason. The ops that tie these
have no arithmetic: zero times infinity would be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

import tensorflow as tf
from gradred.errors import InvalidArgument
from gradred.tensorflow.native import ops

__all__ = ["begin", "end", "forget", "last", "resume", "set_last"]

# The last token of each context in eager mode; in a graph it is kept with the graph.
_eager: dict[int, tf.Tensor] = {}
_KEY = "_gradred_diff_tokens"


def _tokens() -> dict[int, tf.Tensor]:
    if tf.executing_eagerly():
        return _eager
    graph = tf_ops.get_default_graph()
    if not hasattr(graph, _KEY):
        setattr(graph, _KEY, {})
    tokens: dict[int, tf.Tensor] = getattr(graph, _KEY)
    return tokens


def last(context: int) -> tf.Tensor | None:
    """The last token of a context in the current graph, or in eager mode; None: there is none."""
    return _tokens().get(context)


def set_last(context: int, token: tf.Tensor) -> None:
    _tokens()[context] = token


def forget(context: int) -> None:
    """Forgets what eager mode has of a context that is closed."""
    _eager.pop(context, None)


def begin(context: int, xs: Sequence[tf.Tensor], *, backward: bool = False) -> tf.Tensor:
    """Makes a token that depends on ``xs`` and on the last token, the last one; returns it.

    backward: it is a cotangent: of a loop's token it is added to what comes from the step behind.
    """
    before = last(context)
    if before is None and not backward:
        _refuse_loops(xs)
    token = ops.gradred_token_begin(list(xs), context=context)
    if before is not None:
        token = end(context, token, before)
    set_last(context, token)
    return token


def end(context: int, x: tf.Tensor, token: tf.Tensor) -> tf.Tensor:
    """``x``, which from now on depends on the token too."""
    return ops.gradred_token_end(x, token, context=context)


def resume(context: int, token: tf.Tensor) -> None:
    """Goes on behind ``token`` and behind all that has been put into the current graph so far."""
    before = last(context)
    if before is not None and before is not token:
        token = end(context, token, before)
    set_last(context, token)


def _refuse_loops(xs: Sequence[tf.Tensor]) -> None:
    """A loop or a branch gets its token from its caller, or it would begin a chain of its own."""
    if tf.executing_eagerly():
        return
    graph = tf_ops.get_default_graph()
    kinds = (
        control_flow.CondBranchFuncGraph,
        control_flow.WhileBodyFuncGraph,
        control_flow.WhileCondFuncGraph,
    )
    if isinstance(graph, kinds):
        raise InvalidArgument(
            f"an operation of gradred.diff in '{graph.name}', a loop or branch of TensorFlow's: "
            "use the context's while_loop or cond, which hand the token through, in place of "
            "tf.while_loop, tf.cond, tf.map_fn, and Python's `for` and `if` on tensors"
        )


def _trainable(x: tf.Tensor) -> bool:
    return bool(x.dtype.is_floating)


@tf.RegisterGradient("GradredTokenBegin")
def _adjoint_of_begin(op: Any, cotangent: tf.Tensor) -> list[tf.Tensor | None]:
    """Zeros, which come when the adjoints of the whole chain have run."""
    context = op.get_attr("context")
    return [
        ops.gradred_token_zeros(x, cotangent, context=context) if _trainable(x) else None
        for x in op.inputs
    ]


@tf.RegisterGradient("GradredTokenEnd")
def _adjoint_of_end(op: Any, cotangent: tf.Tensor) -> list[tf.Tensor]:
    """The cotangent, and the token with which the backward pass begins."""
    context = op.get_attr("context")
    cotangent = tf.convert_to_tensor(cotangent)
    return [cotangent, begin(context, [cotangent], backward=True)]


@tf.RegisterGradient("GradredTokenZeros")
def _adjoint_of_zeros(op: Any, cotangent: tf.Tensor) -> list[tf.Tensor | None]:
    xs = [tf.convert_to_tensor(cotangent)]
    return [None, begin(op.get_attr("context"), xs, backward=True)]
