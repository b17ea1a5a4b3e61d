"""Collectives on lists of tensors, with their adjoints.

A backward pass is made of the same operations as the forward pass, so each can be differentiated
any number of times. Each rank's gradient is the derivative of the sum of all ranks' losses by that
rank's input. A list travels as one group: all or none. Arguments are checked by the callers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.python.eager import record

import tensorflow as tf
from gradred import basics
from gradred.compression import Compressor
from gradred.errors import Unsupported
from gradred.process_sets import ProcessSet
from gradred.tensorflow import graph
from gradred.tensorflow.ops import Member, declare, reduce_members, run_alltoall, run_members
from gradred.tensorflow.tensors import declared_shape

__all__ = [
    "NO_WIRE",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "gather",
    "reduce_to",
    "reducescatter",
    "send",
]

NO_WIRE = Compressor("none")
_ONE = (1.0, 1.0)

Tensors = Sequence[tf.Tensor]


def _custom_gradient(function: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """``tf.custom_gradient``; its 0.3 ms in eager mode only where something may be recorded."""

    def call(*inputs: tf.Tensor) -> Any:
        if tf.executing_eagerly() and not record.could_possibly_record():
            return function(*inputs)[0]
        return tf.custom_gradient(function)(*inputs)

    return call


def allreduce(
    tensors: Tensors,
    reduce_op: str,
    wire: Compressor,
    scales: tuple[float, float],  # prescale, postscale
    name: str,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Sum and Average are their own adjoints; the others: ``_of_extremum``, ``_of_product``."""

    @_custom_gradient
    def reduce(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        members = _reductions("allreduce", inputs, reduce_op, wire, scales, name)
        number = process_set.require_member(name)
        outputs, _ = reduce_members(declare(name, members, [], number), inputs)

        def backward(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            inner = graph.unique(f"{name}.gradient")
            if reduce_op in ("sum", "average"):
                return allreduce(cotangents, reduce_op, wire, scales, inner, process_set)
            totals = allreduce(cotangents, "sum", NO_WIRE, _ONE, inner, process_set)
            if reduce_op == "product":
                partials = _of_product(inputs, scales, inner, process_set)
            else:
                exact = scales == _ONE and all(m.wire == m.dtype for m in members)
                known = outputs if exact else None
                partials = _of_extremum(inputs, known, reduce_op, scales, inner, process_set)
            return [total * part for total, part in zip(totals, partials, strict=True)]

        return outputs, backward

    return _listed(reduce(*tensors))


def reducescatter(
    tensors: Tensors,
    reduce_op: str,
    wire: Compressor,
    scales: tuple[float, float],
    name: str,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Sum and Average. The adjoint: an allgather, scaled."""

    @_custom_gradient
    def reduce(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        members = _reductions("reducescatter", inputs, reduce_op, wire, scales, name)
        number = process_set.require_member(name)
        outputs, _ = run_members(declare(name, members, [], number), inputs)
        _set_rows(outputs, inputs, _rows_here(process_set))

        def backward(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            inner = graph.unique(f"{name}.gradient")
            if reduce_op not in ("sum", "average"):
                raise Unsupported(
                    f"the gradient of reducescatter of '{name}' with {reduce_op}: expected Sum or "
                    "Average"
                )
            scale = math.prod(scales) / (process_set.size() if reduce_op == "average" else 1)
            gathered = allgather(cotangents, inner, process_set)
            return [_scaled(g, scale) for g in gathered]

        return outputs, backward

    return _listed(reduce(*tensors))


def allgather(tensors: Tensors, name: str, process_set: ProcessSet) -> list[tf.Tensor]:
    """The adjoint: this rank's rows of the sum."""

    @_custom_gradient
    def concatenate(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        gathered = gather(inputs, name, process_set)

        def backward(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            inner = graph.unique(f"{name}.gradient")
            totals = allreduce(cotangents, "sum", NO_WIRE, _ONE, inner, process_set)
            mine = tf.stack([tf.shape(x, tf.int64)[0] for x in inputs])
            [rows] = gather([mine[tf.newaxis]], f"{inner}.rows", process_set)
            rank = process_set.rank()
            first = tf.reduce_sum(rows[:rank], 0)
            return [t[first[i] : first[i] + mine[i]] for i, t in enumerate(totals)]

        return gathered, backward

    return _listed(concatenate(*tensors))


def alltoall(
    tensor: tf.Tensor, splits: tf.Tensor | None, name: str, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    """splits: int64, None: equal parts. Returns rows, and how many came from each rank (int64).

    The adjoint: an alltoall back of what was received.
    """
    received: Any = None

    @_custom_gradient
    def exchange(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        nonlocal received
        dtype = x.dtype.name
        shape = (-1, *declared_shape(x)[1:])
        member = Member(name, "alltoall", dtype, dtype, shape)
        domain = declare(name, [member], [], process_set.require_member(name))
        rows, received = run_alltoall(domain, x, splits)
        _set_rows([rows], [x], lambda n: n if splits is None else None)

        def backward(cotangent: tf.Tensor) -> tf.Tensor:
            inner = graph.unique(f"{name}.gradient")
            return alltoall(cotangent, received, inner, process_set)[0]

        return rows, backward

    return exchange(tensor), received


def broadcast(tensor: tf.Tensor, root: int, name: str, process_set: ProcessSet) -> tf.Tensor:
    """The adjoint: ``reduce_to`` the root."""

    @_custom_gradient
    def spread(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        [result] = send([x], [name], root, name, process_set)

        def backward(cotangent: tf.Tensor) -> tf.Tensor:
            inner = graph.unique(f"{name}.gradient")
            return reduce_to(cotangent, root, inner, process_set)

        return result, backward

    return spread(tensor)


def reduce_to(tensor: tf.Tensor, root: int, name: str, process_set: ProcessSet) -> tf.Tensor:
    """The sum on the root, zeros on the others. The adjoint: ``broadcast``."""

    @_custom_gradient
    def reduce(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        [total] = allreduce([x], "sum", NO_WIRE, _ONE, name, process_set)
        if basics.rank() != root:
            # Not zeros alone: what nobody needs is left out of a graph, and the root would wait.
            with tf.control_dependencies([total]):
                total = tf.identity(tf.zeros_like(total))

        def backward(cotangent: tf.Tensor) -> tf.Tensor:
            return broadcast(cotangent, root, graph.unique(f"{name}.gradient"), process_set)

        return total, backward

    return reduce(tensor)


def gather(tensors: Tensors, name: str, process_set: ProcessSet) -> list[tf.Tensor]:
    """The ranks' rows; not differentiable."""
    members = []
    for label, x in zip(_labels(name, len(tensors)), tensors, strict=True):
        dtype = x.dtype.name
        members.append(Member(label, "allgather", dtype, dtype, (-1, *declared_shape(x)[1:])))
    domain = declare(name, members, [], process_set.require_member(name))
    results, _ = run_members(domain, tensors)
    _set_rows(results, tensors, lambda _: None)
    return results


def send(
    tensors: Tensors, labels: Sequence[str], root: int, name: str, process_set: ProcessSet
) -> list[tf.Tensor]:
    """The root's tensors; not differentiable."""
    members = [
        Member(label, "broadcast", x.dtype.name, x.dtype.name, declared_shape(x), root=root)
        for label, x in zip(labels, tensors, strict=True)
    ]
    domain = declare(name, members, [], process_set.require_member(name))
    results, _ = run_members(domain, tensors)
    if not tf.executing_eagerly():
        for result, x in zip(results, tensors, strict=True):
            result.set_shape(x.shape)
    return results


def _of_extremum(
    inputs: Tensors,
    extrema: Sequence[tf.Tensor] | None,  # None: the results are scaled or rounded
    reduce_op: str,
    scales: tuple[float, float],
    name: str,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Of a minimum or maximum: 1 / number of holders where this rank holds it, else 0; scaled."""
    if extrema is None:
        if scales[0] < 0:
            reduce_op = "min" if reduce_op == "max" else "max"
        inner = f"{name}.extremum"
        extrema = allreduce(inputs, reduce_op, NO_WIRE, _ONE, inner, process_set)
    held = [tf.cast(tf.equal(x, e), x.dtype) for x, e in zip(inputs, extrema, strict=True)]
    holders = allreduce(held, "sum", NO_WIRE, _ONE, f"{name}.holders", process_set)
    scale = math.prod(scales)
    return [_scaled(tf.math.divide_no_nan(h, n), scale) for h, n in zip(held, holders, strict=True)]


def _of_product(
    inputs: Tensors, scales: tuple[float, float], name: str, process_set: ProcessSet
) -> list[tf.Tensor]:
    """Of a product: that of the others, which is not the product by the own one where that is 0."""
    everyone = allgather([x[tf.newaxis] for x in inputs], f"{name}.factors", process_set)
    rank = process_set.rank()
    scale = scales[1] * scales[0] ** process_set.size()
    return [
        _scaled(tf.reduce_prod(tf.concat([x[:rank], x[rank + 1 :]], 0), 0), scale) for x in everyone
    ]


def _reductions(
    operation: str,
    tensors: Tensors,
    reduce_op: str,
    wire: Compressor,
    scales: tuple[float, float],
    name: str,
) -> list[Member]:
    return [
        Member(
            label=label,
            op=operation,
            reduce_op=reduce_op,
            dtype=x.dtype.name,
            wire=wire.wire_of(x.dtype.name),
            shape=declared_shape(x),
            prescale=scales[0],
            postscale=scales[1],
        )
        for label, x in zip(_labels(name, len(tensors)), tensors, strict=True)
    ]


def _labels(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}/{i}" for i in range(count)]


def _scaled(tensor: tf.Tensor, scale: float) -> tf.Tensor:
    return tensor if scale == 1.0 else tensor * tf.constant(scale, tensor.dtype)


def _listed(outputs: Any) -> list[tf.Tensor]:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _rows_here(process_set: ProcessSet) -> Any:
    """A number of rows to that of them which a reducescatter leaves to this rank."""
    size, rank = process_set.size(), process_set.rank()
    return lambda n: n // size + (rank < n % size)


def _set_rows(outputs: Tensors, inputs: Tensors, rows_of: Any) -> None:
    """In a graph: static shapes, with ``rows_of`` the input's rows, where those are known."""
    if tf.executing_eagerly():
        return
    for output, x in zip(outputs, inputs, strict=True):
        rows = x.shape[0]
        # With GRADRED_NULL outputs are as long as inputs.
        if rows is not None:
            rows = None if basics.settings().null else rows_of(rows)
        output.set_shape([rows, *x.shape[1:]])
