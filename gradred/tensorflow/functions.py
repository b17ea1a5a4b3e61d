"""Collectives on tensors, with their gradients.

All are collective over the process set. In eager mode they wait and raise gradred's errors; in a
graph they raise TensorFlow's when it runs (see docs/errors.md), with the same texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import tensorflow as tf
from gradred import basics
from gradred.compression import Compressor, wire_of
from gradred.errors import InvalidArgument, Unsupported
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp, native_name
from gradred.tensorflow import graph
from gradred.tensorflow.graph import plain_python
from gradred.tensorflow.ops import Member, declare, reduce_members, run_members, static_shape

__all__ = [
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_variables",
    "grouped_allreduce",
]

# Types that are moved, not computed with, as others of the same size.
_MOVED_AS = {
    tf.uint16: tf.int16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
}


@plain_python
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor over the ranks, element by element. Collective; differentiable.

    tensor: a tensor, variable or array, the same shape and dtype on all ranks; bool (not Average),
    uint8, int8 to int64, float16, bfloat16, float32 or float64. Or tf.IndexedSlices (Sum, Average):
    the ranks' slices one after the other, not compressed. compression: of Compression; None: the
    setting GRADRED_WIRE. op: Average if not given. average, device_dense, device_sparse and
    ignore_name_scope are there for Horovod's scripts: average=False means Sum, the others mean
    nothing.

    Returns: a tensor of the same shape and dtype, equal on all ranks.

    The gradient, of Sum and Average, is the adjoint: the same reduction of the ranks' cotangents.

    Raises: InvalidArgument, Unsupported; Mismatch when ranks differ; Abandoned, PeerLost and
    others from the ranks; in a graph as tf.errors.OpError.
    """
    op = _op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        scale = float(prescale_factor) * float(postscale_factor)
        return allreduce_slices(tensor, op, scale, name, process_set)
    return grouped_allreduce(
        [tensor],
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        _kind="allreduce",
    )[0]


@plain_python
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    _kind: str = "grouped_allreduce",
) -> list[Any]:
    """Reduces a list of tensors as one group: all or none. Shapes, dtypes and slices may be mixed.

    Arguments, gradients and errors: see ``allreduce``. Returns: the list of results.
    """
    op = _op(op, average)
    reduce_op = native_name(op, _kind)
    number = process_set.require_member(_kind)
    wire = wire_of(compression, basics.settings().wire, _kind)
    domain = graph.domain_name(_kind, name)
    results: list[Any] = list(tensors)
    dense = [i for i, t in enumerate(results) if not isinstance(t, tf.IndexedSlices)]
    scale = float(prescale_factor) * float(postscale_factor)
    for i, tensor in enumerate(results):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = allreduce_slices(tensor, op, scale, f"{domain}/{i}", process_set)
    if not dense:
        return results
    reduced = _allreduce_dense(
        [_tensor(results[i], _kind) for i in dense],
        reduce_op,
        wire,
        (float(prescale_factor), float(postscale_factor)),
        domain,
        number,
    )
    for i, tensor in zip(dense, reduced, strict=True):
        results[i] = tensor
    return results


@plain_python
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The ranks' tensors one after the other along the first dimension. Collective; differentiable.

    tensor: at least one dimension; the first may differ between ranks, the others must agree.

    Returns: a tensor of shape [sum of first dimensions, ...], equal on all ranks.

    The gradient is this rank's part of the sum of the ranks' cotangents. Raises: see ``allreduce``.
    """
    number = process_set.require_member("allgather")
    domain = graph.domain_name("allgather", name)
    moved, restore = _movable(_tensor(tensor, "allgather"))
    if moved.shape.rank == 0:
        raise InvalidArgument(f"allgather of '{domain}': a scalar: expected at least one dimension")

    @tf.custom_gradient
    def gather(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        gathered = _gather(x, domain, number)

        def backward(cotangent: tf.Tensor) -> tf.Tensor:
            inner = graph.unique(f"{domain}.gradient")
            total = _allreduce_dense([cotangent], "sum", _NO_WIRE, (1.0, 1.0), inner, number)[0]
            rows = _gather(tf.shape(x, tf.int64)[:1], f"{inner}.rows", number)
            first = tf.reduce_sum(rows[: process_set.rank()])
            return total[first : first + rows[process_set.rank()]]

        return gathered, backward

    return restore(gather(moved))


@plain_python
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The tensor of one rank, on all ranks. Collective; differentiable.

    tensor: the same shape and dtype on all ranks. root_rank: a rank of the world that is in the
    process set.

    The gradient is, on the root, the sum of the ranks' cotangents, and zero on the others.
    Raises: see ``allreduce``.
    """
    number = process_set.require_member("broadcast")
    root = _root(root_rank, process_set, "broadcast")
    domain = graph.domain_name("broadcast", name)
    moved, restore = _movable(_tensor(tensor, "broadcast"))

    @tf.custom_gradient
    def send(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        result = _broadcast([x], [domain], root, domain, number)[0]

        def backward(cotangent: tf.Tensor) -> tf.Tensor:
            inner = graph.unique(f"{domain}.gradient")
            total = _allreduce_dense([cotangent], "sum", _NO_WIRE, (1.0, 1.0), inner, number)[0]
            if basics.rank() == root:
                return total
            # Not zeros alone: what nobody needs is left out of a graph, and the root would wait.
            with tf.control_dependencies([total]):
                return tf.identity(tf.zeros_like(total))

        return result, backward

    return restore(send(moved))


@plain_python
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives all ranks the root's values of variables. Collective; not differentiable.

    variables: tf.Variable or keras.Variable, alike on all ranks in number, order, shape and dtype;
    names do not matter. inplace means nothing.

    Returns: None; in a graph of tf.compat.v1 the operation that does it.
    """
    return _broadcast_variables(list(variables), root_rank, None, process_set)


@plain_python
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Sequence[Any]:
    """As ``broadcast_variables``. Returns: the variables."""
    _broadcast_variables(list(variables), root_rank, name, process_set)
    return variables


@plain_python
def barrier(name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns when all ranks of the process set have called it. Collective.

    In a tf.function it runs in the order of the program. Returns: None; in a graph of tf.compat.v1
    the operation that finishes then.
    """
    number = process_set.require_member("barrier")
    label = graph.domain_name("barrier", name)
    member = Member(label, "barrier", "uint8", "uint8", (0,))
    domain = declare(label, [member], [], number)
    results, _ = run_members(domain, [tf.zeros([0], tf.uint8)], ordered=True)
    return None if graph.runs_by_itself() else results[0].op


def allreduce_slices(
    slices: tf.IndexedSlices,
    op: ReduceOp | int,
    scale: float,
    name: str | None,
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    """The ranks' slices one after the other; Average divides the values by the number of ranks."""
    if op not in (ReduceOp.Sum, ReduceOp.Average):
        raise Unsupported(f"allreduce of tf.IndexedSlices with op={op!r}: expected Sum or Average")
    number = process_set.require_member("allreduce")
    domain = graph.domain_name("allreduce", name)
    if op == ReduceOp.Average:
        scale /= process_set.size()
    values, indices = (
        _gather(part, f"{domain}.{what}", number)
        for what, part in (("values", slices.values), ("indices", slices.indices))
    )
    if scale != 1.0:
        if not values.dtype.is_floating:
            raise Unsupported(
                f"allreduce of tf.IndexedSlices of {values.dtype.name} by a factor of {scale}: "
                "expected floating-point values, or Sum without factors"
            )
        values *= tf.constant(scale, values.dtype)  # tf.cast would round it to float32 first
    return tf.IndexedSlices(values, indices, slices.dense_shape)


_NO_WIRE = Compressor("none")


def _allreduce_dense(
    tensors: Sequence[tf.Tensor],
    reduce_op: str,
    wire: Compressor,
    scales: tuple[float, float],
    name: str,
    process_set: int,
) -> list[tf.Tensor]:
    """allreduces as one group, with the gradient."""

    @tf.custom_gradient
    def reduce(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        members = [
            Member(
                label=name if len(inputs) == 1 else f"{name}/{i}",
                op="allreduce",
                reduce_op=reduce_op,
                dtype=x.dtype.name,
                wire=wire.wire_of(x.dtype.name),
                shape=_declared_shape(x),
                prescale=scales[0],
                postscale=scales[1],
            )
            for i, x in enumerate(inputs)
        ]
        outputs, _ = reduce_members(declare(name, members, [], process_set), inputs)

        def backward(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            if reduce_op not in ("sum", "average"):
                raise Unsupported(f"the gradient of allreduce with {reduce_op}: of Sum and Average")
            inner = graph.unique(f"{name}.gradient")
            return _allreduce_dense(cotangents, reduce_op, wire, scales, inner, process_set)

        return outputs, backward

    outputs = reduce(*tensors)
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _gather(tensor: tf.Tensor, name: str, process_set: int) -> tf.Tensor:
    shape = _declared_shape(tensor)
    dtype = tensor.dtype.name
    member = Member(name, "allgather", dtype, dtype, (-1, *shape[1:]))
    results, _ = run_members(declare(name, [member], [], process_set), [tensor])
    if not tf.executing_eagerly():
        results[0].set_shape([None, *tensor.shape[1:]])
    return results[0]


def _broadcast(
    tensors: Sequence[tf.Tensor], labels: Sequence[str], root: int, name: str, process_set: int
) -> list[tf.Tensor]:
    members = [
        Member(label, "broadcast", x.dtype.name, x.dtype.name, _declared_shape(x), root=root)
        for label, x in zip(labels, tensors, strict=True)
    ]
    results, _ = run_members(declare(name, members, [], process_set), tensors)
    if not tf.executing_eagerly():
        for result, x in zip(results, tensors, strict=True):
            result.set_shape(x.shape)
    return results


def _broadcast_variables(
    variables: list[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> Any:
    number = process_set.require_member("broadcast_variables")
    root = _root(root_rank, process_set, "broadcast_variables")
    if not variables:
        return None
    domain = graph.domain_name("broadcast_variables", name)
    moved = [_movable(tf.convert_to_tensor(v)) for v in variables]
    labels = [label_of(v) for v in variables]
    results = _broadcast([x for x, _ in moved], labels, root, domain, number)
    updates = [
        variable.assign(restore(result))
        for variable, (_, restore), result in zip(variables, moved, results, strict=True)
    ]
    return None if graph.runs_by_itself() else tf.group(*updates)


def label_of(variable: Any) -> str:
    """A variable's name for messages: "dense/kernel"."""
    return str(getattr(variable, "path", None) or variable.name).removesuffix(":0")


def _declared_shape(tensor: tf.Tensor) -> tuple[int, ...]:
    """In eager mode no shape is declared, so that a loop over shapes declares one domain."""
    shape = static_shape(tensor)
    if shape is None:
        raise InvalidArgument(
            f"'{tensor.name}' has an unknown number of dimensions: set its shape, unknown "
            "dimensions may be None"
        )
    return (-1,) * len(shape) if tf.executing_eagerly() else shape


def _tensor(value: Any, what: str) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{what}: {type(value).__name__} is no tensor: {error}") from error


def _movable(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """A tensor that can travel, and the function that gives its result the dtype back."""
    dtype = tensor.dtype
    if dtype not in _MOVED_AS:
        return tensor, lambda result: result
    return tf.bitcast(tensor, _MOVED_AS[dtype]), lambda result: tf.bitcast(result, dtype)


def _op(op: ReduceOp | int | None, average: bool | None) -> ReduceOp | int:
    if average is not None:
        if op is not None:
            raise InvalidArgument("allreduce: both op and average are given: expected op alone")
        return ReduceOp.Average if average else ReduceOp.Sum
    return ReduceOp.Average if op is None else op


def _root(root_rank: int, process_set: ProcessSet, what: str) -> int:
    if isinstance(root_rank, int | np.integer) and root_rank in process_set.ranks:
        return int(root_rank)
    raise InvalidArgument(
        f"{what}: root_rank={root_rank!r}: expected a rank of the process set "
        f"({', '.join(map(str, process_set.ranks))})"
    )
