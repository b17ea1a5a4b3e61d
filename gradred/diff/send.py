"""Send and recv: a message from one rank to another, each other's adjoint.

Both ranks of a pair make their calls in one order. See ``Context.begin`` and ``Context.end``: a
rank that only sends has nothing by which a loss depends on the message.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, check_rank, operation, run
from gradred.errors import InvalidArgument

__all__ = ["recv", "send"]


@partial(operation, collective=False)
def send(x: Any, context: Context, destination: int, name: str | None = None) -> None:
    """Sends ``x`` to a rank that calls ``recv``. For the two ranks; differentiable.

    The adjoint receives the cotangent from there.
    """
    x = as_tensor(x, "send")
    peer = _peer(destination, context, "send")
    run(context, "send", [x], params=[peer], dtypes=[], shapes=[], name=name)


@partial(operation, collective=False)
def recv(like: Any, context: Context, source: int, name: str | None = None) -> tf.Tensor:
    """What a rank that calls ``send`` has sent. For the two ranks; differentiable.

    like: a tensor of the shape and dtype of the message; its values do not count. The adjoint sends
    the cotangent there.

    Raises: Mismatch: the message is another; it ends the context, on all its ranks.
    """
    like = as_tensor(like, "recv")
    [y] = run(context, "recv", [like], params=[_peer(source, context, "recv")], name=name)
    return y


def _peer(rank: Any, context: Context, operation: str) -> int:
    peer = check_rank(rank, context, operation)
    if peer == context.rank:
        raise InvalidArgument(
            f"{operation} in context '{context.name}': rank {peer} is this one, and would wait for "
            "itself: expected another, or sendrecv"
        )
    return peer


@adjoint_of("send", "recv", lambda node: [node.params[0]])
def _adjoint_of_send(node: Node) -> list[tf.Tensor]:
    return [recv(node.inputs[0], node.context, node.params[0])]


@adjoint_of("recv", "send", lambda node: [node.params[0]])
def _adjoint_of_recv(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor | None]:
    send(cotangent, node.context, node.params[0])
    return [None]
