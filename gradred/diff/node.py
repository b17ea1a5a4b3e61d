"""Nodes: one execution of an operation in a graph, and its adjoint.

To add an operation: see Note [To add an operation] in native/src/diff/operation.h. In Python it is
a function that checks its arguments and calls ``run``, and an adjoint, registered under the
operation's name with ``adjoint_of``, made of functions of the same kind.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import tensorflow as tf
from gradred._native import core
from gradred.diff import token
from gradred.errors import Error, InvalidArgument
from gradred.tensorflow import graph
from gradred.tensorflow.native import as_gradred_error, native_errors, ops
from gradred.tensorflow.tensors import as_reducible
from gradred.uncaught import as_utf8

if TYPE_CHECKING:
    from gradred.diff.context import Context

__all__ = [
    "Node",
    "adjoint_of",
    "as_number",
    "as_tensor",
    "check_rank",
    "contexts",
    "operation",
    "peers_of",
    "run",
    "telling_nobody",
    "told",
]

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


_Function = TypeVar("_Function", bound=Callable[..., Any])
# On an exception: ids of the contexts whose members hear of it without more being done.
_TOLD = "_gradred_told"
_quiet = threading.local()


def operation(function: _Function, *, collective: bool = True) -> _Function:
    """Of functions that users call: what goes wrong before ``run`` is told to the other ranks.

    They would wait for this rank else. Their operation at this place fails with the text; of one
    that is not ``collective`` the context ends. Nothing waits here. The context is an argument, or
    that of one (``context`` or ``grid.context``).
    """

    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not getattr(_quiet, "on", False):
                _tell(name, error, collective, (*args, *kwargs.values()))
            raise

    return cast(_Function, graph.plain_python(checked))


def _tell(what: str, error: Exception, collective: bool, arguments: Sequence[Any]) -> None:
    from gradred.diff.context import Context

    for argument in arguments:
        context = getattr(getattr(argument, "grid", argument), "context", argument)
        if isinstance(context, Context):
            known = told(error)
            if context.id in known:
                return
            setattr(error, _TOLD, known | {context.id})
            if context.included and context.size > 1:
                with contextlib.suppress(Error):  # it is closed, which the others know
                    core.diff_refuse(context.id, what, as_utf8(str(error)), collective)
            return


def told(error: BaseException | None) -> set[int]:
    """Ids of the contexts whose members know of an exception, or of one that it was raised from.

    What is raised while another exception is handled is a new one.
    """
    known: set[int] = set()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        known |= getattr(error, _TOLD, set())
        if isinstance(error, tf.errors.OpError) and (ours := as_gradred_error(error)) is not None:
            # An operation that has run in a graph. Its text says where.
            for context in tuple(contexts.values()):
                if f"context '{context.name}'" in str(ours):
                    known |= _hearers(context, ours)
        # AutoGraph makes an exception of its own of what is raised while it traces.
        same = hasattr(error, "ag_error_metadata")
        error = error.__cause__ or (error.__context__ if same else None)
    return known


def _hearers(context: Context, error: Exception) -> set[int]:
    """Ids of the contexts whose members hear of an error of an operation that has run."""
    if not str(error).startswith("operation "):  # found by one rank: the context has ended
        return {context.id}
    everybody = set(context.ranks)  # each has it at the same place
    return {other.id for other in tuple(contexts.values()) if everybody.issuperset(other.ranks)}


@contextlib.contextmanager
def telling_nobody() -> Iterator[None]:
    """Within, errors of operations stay on this rank: nothing is to be run."""
    before = getattr(_quiet, "on", False)
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = before


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
    try:
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
    except Exception as error:
        if tf.executing_eagerly() and isinstance(error, (Error, tf.errors.OpError)):  # it has run
            setattr(error, _TOLD, _hearers(context, error))
        raise
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


def as_number(value: Any, what: str) -> int:
    """An int of any kind of whole number, NumPy's too. Raises InvalidArgument for others."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{what}: expected a whole number, got {value!r}") from None


def check_rank(rank: Any, context: Context, operation: str) -> int:
    """The number of a rank of the context. Raises InvalidArgument for what is none."""
    what = f"{operation} in context '{context.name}'"
    number = as_number(rank, what)
    if not 0 <= number < context.size:
        raise InvalidArgument(f"{what}: expected a rank from 0 to {context.size - 1}, got {rank!r}")
    return number
