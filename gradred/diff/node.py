"""Nodes: one execution of an operation in a graph, and its adjoint.

To add an operation: see Note [To add an operation] in native/src/diff/operation.h. In Python it is
a function that checks its arguments and calls ``run``, and an adjoint, registered under the
operation's name with ``adjoint_of``, made of functions of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from gradred.diff import token
from gradred.errors import InvalidArgument
from gradred.tensorflow import graph
from gradred.tensorflow.native import native_errors, ops
from gradred.tensorflow.tensors import as_reducible

if TYPE_CHECKING:
    from gradred.diff.context import Context

__all__ = ["Node", "adjoint_of", "as_tensor", "check_rank", "contexts", "peers_of", "run"]

# By id, all that were made: graphs refer to them.
contexts: dict[int, Context] = {}


@dataclass(frozen=True)
class Node:
    """What an adjoint may know: cotangents are given with it."""

    context: Context
    operation: str
    params: tuple[int, ...]
    inputs: Sequence[tf.Tensor]  # without the token
    outputs: Sequence[tf.Tensor]

    @property
    def of_integers(self) -> bool:
        """Nothing has a cotangent. Alike on all ranks that communicate: they agree on dtypes."""
        return not any(tensor.dtype.is_floating for tensor in (*self.inputs, *self.outputs))


# (node, cotangents of the outputs) -> cotangents of the inputs; None where there is none.
Adjoint = Callable[..., Sequence["tf.Tensor | None"]]
_adjoints: dict[str, Adjoint] = {}
# For ``describe``: (node) -> the ranks that this one talks to, and the name of the adjoint.
Peers = Callable[[Node], Sequence[int]]
_peers: dict[str, tuple[Peers, str]] = {}


def _everybody(node: Node) -> Sequence[int]:
    return [rank for rank in range(node.context.size) if rank != node.context.rank]


def adjoint_of(
    operation: str, name: str, peers: Peers = _everybody
) -> Callable[[Adjoint], Adjoint]:
    """Registers an adjoint: ``adjoint(node, *cotangents)``, called where the graph is built.

    name: what it does, for ``describe``; "": it sends nothing. peers: of the operation.
    """

    def register(adjoint: Adjoint) -> Adjoint:
        _adjoints[operation] = adjoint
        _peers[operation] = (peers, name)
        return adjoint

    return register


def peers_of(node: Node) -> tuple[list[int], str]:
    """The ranks of the context that a node of this rank talks to, and what its adjoint is."""
    peers, name = _peers[node.operation]
    return sorted(peers(node)), "" if node.of_integers else name


def run(
    context: Context,
    operation: str,
    inputs: Sequence[tf.Tensor],
    *,
    params: Sequence[int] = (),
    dtypes: Sequence[tf.DType] | None = None,
    shapes: Sequence[Any] | None = None,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Runs a native operation behind all others of its context. Returns its outputs.

    dtypes: of the outputs; None: one, of the dtype of the first input. shapes: of the outputs, as
    far as they are known; None: one, of the shape of the first input. name: of the node, for
    errors.
    """
    context.require_member(operation)
    graph.refuse_xla(f"{operation} of gradred.diff")
    dtypes = [inputs[0].dtype] if dtypes is None else dtypes
    shapes = [inputs[0].shape] if shapes is None else shapes
    before = token.last(context.id)
    if before is None:
        before = token.begin(context.id, inputs)
    with native_errors():
        outputs, after = ops.gradred_diff(
            list(inputs),
            before,
            Tout=list(dtypes),
            operation=operation,
            context=context.id,
            params=list(params),
            name=name,
        )
    if not tf.executing_eagerly():
        after.set_shape(())
        for output, shape in zip(outputs, shapes, strict=True):
            output.set_shape(shape)
    token.set_last(context.id, after)
    return list(outputs)


@tf.RegisterGradient("GradredDiff")
def _gradient(op: Any, *cotangents: Any) -> list[tf.Tensor | None]:
    operation = op.get_attr("operation")
    if isinstance(operation, bytes):
        operation = operation.decode()
    context = contexts[op.get_attr("context")]
    params = tuple(int(p) for p in op.get_attr("params"))
    node = Node(context, operation, params, op.inputs[:-1], op.outputs[:-1])
    *dense, last = [c if c is None else tf.convert_to_tensor(c) for c in cotangents]
    if node.of_integers:
        return [*([None] * len(node.inputs)), last]
    token.resume(context.id, last)
    results = _adjoints[operation](node, *dense)
    after = token.last(context.id)
    return [*results, after]


def as_tensor(value: Any, operation: str) -> tf.Tensor:
    """A tensor of a dtype that can travel. Raises InvalidArgument."""
    return as_reducible(value, operation)


def check_rank(rank: int, context: Context, operation: str) -> int:
    """Raises InvalidArgument for what is none of the context's ranks."""
    if not isinstance(rank, int) or not 0 <= rank < context.size:
        raise InvalidArgument(
            f"{operation} in context '{context.name}': expected a rank from 0 to "
            f"{context.size - 1}, got {rank!r}"
        )
    return rank
