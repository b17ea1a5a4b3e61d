"""Sendrecv and shift: every rank sends to one rank and receives from one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_number, as_tensor, check_rank, operation, run
from gradred.errors import InvalidArgument

__all__ = ["sendrecv", "shift"]


@operation
def sendrecv(
    x: Any,
    context: Context,
    destination: int | None,
    source: int | None,
    like: Any = None,
    name: str | None = None,
) -> tf.Tensor:
    """What ``source`` has sent, while ``x`` goes to ``destination``. Collective; differentiable.

    destination, source: ranks of the context, maybe this one; None: nobody, from whom zeros come.
    like: a tensor of the shape and dtype to receive; None: ``x``. The adjoint sends the cotangent
    to the source and receives that of ``x`` from the destination.

    Raises: Mismatch: the message is another; it ends the context, on all its ranks.
    """
    x = as_tensor(x, "sendrecv")
    like = x if like is None else as_tensor(like, "sendrecv")
    if like.dtype != x.dtype:
        raise InvalidArgument(f"sendrecv: like is {like.dtype.name}, x is {x.dtype.name}")
    peers = [
        -1 if peer is None else check_rank(peer, context, "sendrecv")
        for peer in (destination, source)
    ]
    [y] = run(context, "sendrecv", [x, like], params=peers, shapes=[like.shape], name=name)
    return y


@operation
def shift(
    x: Any, context: Context, displacement: int = 1, dim: int = 0, name: str | None = None
) -> tf.Tensor:
    """Moves values along a dimension of the context's grid. Collective; differentiable.

    Each rank gets the ``x`` of the rank ``displacement`` places before it; at an end that is one,
    zeros. x: of the same shape and dtype on all ranks.
    """
    displacement = as_number(displacement, "shift: displacement")
    dim = as_number(dim, "shift: dim")
    if not 0 <= dim < len(context.dims):
        raise InvalidArgument(
            f"shift in context '{context.name}': expected a dim from 0 to {len(context.dims) - 1}, "
            f"got {dim}"
        )
    destination = context.neighbour(dim, displacement)
    source = context.neighbour(dim, -displacement)
    return sendrecv(x, context, destination, source, name=name)


def _peers(node: Node) -> list[int]:
    return [peer for peer in {*node.params} if peer not in (-1, node.context.rank)]


@adjoint_of("sendrecv", "sendrecv", _peers)
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor | None]:
    destination, source = (None if peer < 0 else peer for peer in node.params)
    return [sendrecv(cotangent, node.context, source, destination, node.inputs[0]), None]
