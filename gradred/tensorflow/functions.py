"""Collectives on tensors, with their gradients.

All are collective over the process set. In eager mode they wait and raise gradred's errors; in a
graph they raise TensorFlow's when it runs (see docs/errors.md), with the same texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import tensorflow as tf
from gradred import basics
from gradred.arrays import as_list
from gradred.compression import wire_of
from gradred.errors import InvalidArgument, Unsupported
from gradred.process_sets import ProcessSet, global_process_set, member_of
from gradred.reduce_ops import ReduceOp, checked_factors, native_name
from gradred.tensorflow import differentiable, graph
from gradred.tensorflow.graph import plain_python
from gradred.tensorflow.objects import allgather_object, broadcast_object, broadcast_object_fn
from gradred.tensorflow.ops import Member, declare, run_members
from gradred.tensorflow.tensors import as_reducible, as_tensor, movable
from gradred.tensorflow.variables import label_of

__all__ = [
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "grouped_allreduce",
    "join",
]


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
    int8 to int64, uint8 to uint64, float16, bfloat16, float32 or float64. Or tf.IndexedSlices (Sum,
    Average): the ranks' slices one after the other, not compressed. compression: of Compression;
    None: the setting GRADRED_WIRE. op: Average if not given. average, device_dense, device_sparse
    and ignore_name_scope are there for Horovod's scripts: average=False means Sum, the others mean
    nothing.

    Returns: a tensor of the same shape and dtype, equal on all ranks.

    The gradient of Sum and Average is the adjoint: the same reduction of the ranks' cotangents. Of
    Min and Max the sum of the cotangents goes to the ranks that hold the extremum, in equal shares;
    of Product it is multiplied by the others' factors.

    Raises: InvalidArgument, Unsupported; Mismatch when ranks differ; Abandoned, PeerLost and
    others from the ranks; in a graph as tf.errors.OpError.
    """
    op = _op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        scale = math.prod(checked_factors(prescale_factor, postscale_factor, "allreduce"))
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
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    _kind: str = "grouped_allreduce",
) -> list[Any]:
    """Reduces a list of tensors as one group: all or none. Shapes, dtypes and slices may be mixed.

    Arguments, gradients and errors: see ``allreduce``. Returns: the list of results.
    """
    op = _op(op, average)
    reduce_op = native_name(op, _kind)
    member_of(process_set, _kind)
    scales = checked_factors(prescale_factor, postscale_factor, _kind)
    wire = wire_of(compression, basics.settings().wire, _kind)
    domain = graph.domain_name(_kind, name, process_set)
    results = as_list(tensors, f"{_kind} of '{domain}'")
    dense = [i for i, t in enumerate(results) if not isinstance(t, tf.IndexedSlices)]
    for i, tensor in enumerate(results):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = allreduce_slices(
                tensor, op, math.prod(scales), f"{domain}/{i}", process_set
            )
    if not dense:
        return results
    reduced = differentiable.allreduce(
        [as_reducible(results[i], f"{_kind} of '{domain}'") for i in dense],
        reduce_op,
        wire,
        scales,
        domain,
        process_set,
    )
    for i, tensor in zip(dense, reduced, strict=True):
        results[i] = tensor
    return results


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
    member_of(process_set, "broadcast")
    root = _root(root_rank, process_set, "broadcast")
    domain = graph.domain_name("broadcast", name, process_set)
    moved, restore = movable(as_tensor(tensor, "broadcast"), f"broadcast of '{domain}'")
    return restore(differentiable.broadcast(moved, root, domain, process_set))


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
    number = member_of(process_set, "barrier")
    label = graph.domain_name("barrier", name, process_set)
    member = Member(label, "barrier", "uint8", "uint8", (0,))
    domain = declare(label, [member], [], number)
    results, _ = run_members(domain, [tf.zeros([0], tf.uint8)], ordered=True)
    return None if graph.runs_by_itself() else results[0].op


@plain_python
def join() -> Any:
    """Waits until all ranks have joined: see gradred.join. Collective.

    In a tf.function it joins when that runs, in the order of the program.

    Returns: the last rank to join; in a graph an int32 tensor.
    """
    if tf.executing_eagerly():
        return basics.join()
    graph.refuse_xla("join")
    last = tf.numpy_function(lambda: np.int32(basics.join()), [], tf.int32)
    last.set_shape([])
    return last


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
    member_of(process_set, "allreduce")
    domain = graph.domain_name("allreduce", name, process_set)
    if op == ReduceOp.Average:
        scale /= process_set.size()
    dtype = slices.values.dtype
    if scale != 1.0 and not dtype.is_floating:
        raise Unsupported(
            f"allreduce of tf.IndexedSlices of {dtype.name} by a factor of {scale}: "
            "expected floating-point values, or Sum without factors"
        )
    parts = [slices.values, slices.indices]
    values, indices = differentiable.gather(parts, domain, process_set)
    if scale != 1.0:
        values *= tf.constant(scale, values.dtype)  # tf.cast would round it to float32 first
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _broadcast_variables(
    variables: list[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> Any:
    member_of(process_set, "broadcast_variables")
    root = _root(root_rank, process_set, "broadcast_variables")
    if not variables:
        return None
    domain = graph.domain_name("broadcast_variables", name, process_set)
    labels = [label_of(v) for v in variables]
    moved = [
        movable(tf.convert_to_tensor(v), f"broadcast_variables of '{label}'")
        for v, label in zip(variables, labels, strict=True)
    ]
    tensors = [x for x, _ in moved]
    results = differentiable.send(tensors, labels, root, domain, process_set)
    updates = [
        variable.assign(restore(result))
        for variable, (_, restore), result in zip(variables, moved, results, strict=True)
    ]
    return None if graph.runs_by_itself() else tf.group(*updates)


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
