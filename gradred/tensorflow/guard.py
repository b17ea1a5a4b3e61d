"""Gradients are reduced once: not never, and not twice."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from tensorflow.core.framework import attr_value_pb2

import tensorflow as tf
from gradred.errors import InvalidArgument
from gradred.tensorflow.variables import label_of, variable_key

__all__ = ["TAPE", "mark_reduced", "note_tape", "refuse_reduced", "require_reduced"]

TAPE = "tape"  # the kind of domain of distributed tapes

_MARK = "_gradred_reduced"  # attribute of an operation: the domain that its inputs come from

# Tapes whose gradients were reduced in eager mode, while the program still holds them, with the
# keys of their sources.
_tapes: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()

# What programs do with gradients before they apply them: clipping, scaling, adding.
_POSTPROCESSING = frozenset(
    {
        *("Add", "AddN", "AddV2", "Cast", "CheckNumerics", "ClipByValue", "Div", "DivNoNan"),
        *("Identity", "IdentityN", "Maximum", "Minimum", "Mul", "Neg", "RealDiv", "Reshape"),
        *("Select", "SelectV2", "Sub", "StatelessIf", "If", "GatherV2", "UnsortedSegmentSum"),
    }
)


def note_tape(tape: Any, sources: Sequence[Any]) -> None:
    """Remembers, in eager mode, that a distributed tape has reduced these sources' gradients."""
    if tf.executing_eagerly():
        _tapes[tape] = frozenset(variable_key(source) for source in sources)


def mark_reduced(tensor: tf.Tensor, domain: str) -> tf.Tensor:
    """The tensor; in a graph also known as reduced, where a branch hides what has reduced it.

    domain: name of the domain of the gradients. Local.
    """
    if tf.executing_eagerly():
        return tensor
    marked = tf.identity(tensor)
    marked.op._set_attr(_MARK, attr_value_pb2.AttrValue(s=domain.encode()))
    return marked


def refuse_reduced(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises InvalidArgument if a tape has reduced these gradients already.

    In a graph gradients are followed back through clipping and scaling. In eager mode nothing
    leads back, so it is an error if a distributed tape that the program still holds was asked for
    gradients of the same variables.
    """
    for gradient, variable in zip(gradients, variables, strict=True):
        if _is_of_tape(gradient, variable):
            raise InvalidArgument(
                f"the gradient of '{label_of(variable)}' is reduced by a DistributedGradientTape "
                "and would be again by a distributed optimizer: use one of the two"
            )


def require_reduced(
    gradients: Sequence[Any], variables: Sequence[Any], local: frozenset[int], what: str
) -> None:
    """Raises InvalidArgument if a gradient was not reduced; the converse of ``refuse_reduced``.

    local: keys of variables whose gradients need not be. what: the user's words for it.
    """
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None or variable_key(variable) in local:
            continue
        reduced = (
            _is_of_tape(gradient, variable)
            if tf.executing_eagerly()
            else any(_domain_of(op) is not None for op in _sources(gradient))
        )
        if not reduced:
            raise InvalidArgument(
                f"{what} with a distributed optimizer, and nobody has reduced the gradient of "
                f"'{label_of(variable)}': leave that argument out, or name what is local with "
                "register_local_var"
            )


def _is_of_tape(gradient: Any, variable: Any) -> bool:
    if gradient is None:
        return False
    if tf.executing_eagerly():
        key = variable_key(variable)
        return any(key in sources for sources in list(_tapes.values()))
    return any((_domain_of(op) or b"").startswith(f"{TAPE}:".encode()) for op in _sources(gradient))


def _domain_of(op: Any) -> bytes | None:
    """The domain that has reduced what an operation returns, as far as that can be seen from it."""
    name = "domain"
    if op.type == "GradredWait":
        op = op.inputs[0].op.inputs[1].op  # the Begin of its Submit
    elif op.type == "GradredReduce":
        op = op.inputs[1].op
    elif op.type != "GradredRunList":
        name = _MARK
    try:
        return bytes(op.get_attr(name))
    except ValueError:  # no such attribute
        return None


def _sources(gradient: Any) -> Iterator[Any]:
    """The operations that a gradient was computed by, behind clipping and scaling."""
    waiting = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient]
    seen = set()
    while waiting:
        op = _outside(waiting.pop()).op
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type in _POSTPROCESSING and _domain_of(op) is None:
            waiting.extend(op.inputs)
        else:
            yield op


def _outside(tensor: tf.Tensor) -> tf.Tensor:
    """What a function's captured input stands for."""
    while tensor.op.type == "Placeholder":
        outer = next((o for o, i in getattr(tensor.graph, "captures", ()) if i is tensor), None)
        if outer is None or not hasattr(outer, "graph"):
            break
        tensor = outer
    return tensor
