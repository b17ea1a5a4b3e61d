"""What a function communicates, read from its graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from gradred.diff.node import Node, contexts, peers_of, telling_nobody

__all__ = ["Communication", "describe"]


@dataclass(frozen=True)
class Communication:
    """One node of a graph, on this rank."""

    operation: str
    context: str  # its name
    where: str  # the node; of one in a loop or a called function with that one's name before it
    peers: tuple[int, ...]  # ranks of the job that this one sends to or receives from
    nbytes: int | None  # of the tensor handed over; None: not known before it runs
    adjoint: str  # what its gradient sends; "": nothing
    adjoint_nbytes: int | None  # of the cotangent handed over

    def __str__(self) -> str:
        def size(nbytes: int | None) -> str:
            return "? bytes" if nbytes is None else f"{nbytes} bytes"

        peers = ", ".join(map(str, self.peers)) or "nobody"
        back = f"{self.adjoint} of {size(self.adjoint_nbytes)}" if self.adjoint else "nothing"
        return (
            f"{self.where}: {self.operation} of {size(self.nbytes)} in '{self.context}' with "
            f"{peers}; backward: {back}"
        )


def describe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Communication]:
    """The communication of a function in the order in which it was traced. Local; sends nothing.

    function: a ``tf.function``, a concrete one, or any function, which is traced with the
    arguments. If it computes gradients itself, their nodes are listed as well; else ``adjoint``
    says what its backward pass will send. A node in a loop is listed once.
    """
    traced: Any = function
    if not hasattr(traced, "structured_outputs"):  # of a concrete function
        if not hasattr(traced, "get_concrete_function"):
            traced = tf.function(traced)
        with telling_nobody():
            traced = traced.get_concrete_function(*args, **kwargs)
    return [_describe(node, where) for node, where in _nodes(traced.graph, "")]


def _nodes(graph: Any, prefix: str) -> Iterator[tuple[Node, str]]:
    for op in graph.get_operations():
        where = prefix + op.name
        if op.type == "GradredDiff":
            yield (
                Node(
                    contexts[op.get_attr("context")],
                    op.get_attr("operation").decode(),
                    tuple(op.get_attr("params")),
                    op.inputs[:-1],
                    op.outputs[:-1],
                ),
                where,
            )
            continue
        for value in op.node_def.attr.values():
            for called in [value.func, *value.list.func]:
                if called.name:
                    yield from _nodes(_graph_of(graph, called.name), f"{where}/")


def _graph_of(graph: Any, name: str) -> Any:
    """The graph of a function that `graph` calls."""
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function.graph
        graph = graph.outer_graph
    raise KeyError(name)


def _describe(node: Node, where: str) -> Communication:
    peers, adjoint = peers_of(node)
    context = node.context
    adjoint_of = list(node.outputs[:1]) or list(node.inputs[:1])
    return Communication(
        node.operation,
        context.name,
        where,
        tuple(context.ranks[peer] for peer in peers),
        _nbytes(node.inputs[:1]),
        adjoint,
        _nbytes(adjoint_of),
    )


def _nbytes(tensors: Sequence[tf.Tensor]) -> int | None:
    total = 0
    for tensor in tensors:
        if tensor.shape.rank is None or None in tensor.shape.as_list():
            return None
        total += math.prod(tensor.shape.as_list()) * tensor.dtype.size
    return total
