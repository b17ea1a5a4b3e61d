"""Reducing the gradients of a list of variables: what optimizers and tapes share."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from gradred import basics, grouping
from gradred.compression import wire_of
from gradred.errors import InvalidArgument, Unsupported
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp, native_name
from gradred.tensorflow import graph
from gradred.tensorflow.functions import allreduce_slices, label_of
from gradred.tensorflow.ops import Domain, Member, declare, reduce_members

__all__ = ["GradientReducer", "Options"]


@dataclass(frozen=True)
class Options:
    """How gradients are reduced. See DistributedOptimizer."""

    op: ReduceOp | int = ReduceOp.Average
    compression: Any = None
    groups: grouping.Groups = None
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set

    def check(self, what: str) -> None:
        """Raises InvalidArgument or Unsupported for what cannot be, naming it."""
        name = native_name(self.op, what)
        if name not in ("sum", "average"):
            raise Unsupported(f"{what}: op={self.op!r}: expected Sum or Average")
        factor = self.gradient_predivide_factor
        if factor != 1.0 and name != "average":
            raise InvalidArgument(
                f"{what}: gradient_predivide_factor={factor} with op={self.op!r}: expected Average"
            )
        if not factor > 0:
            raise InvalidArgument(f"{what}: gradient_predivide_factor={factor}: expected > 0")
        wire_of(self.compression, "none", what)
        if isinstance(self.groups, str):
            grouping.parse(self.groups)
        elif isinstance(self.groups, int) and self.groups < 0:
            raise InvalidArgument(f"{what}: groups={self.groups}: expected at least 0")


# Note [Order of the entries]
# Entries are listed in the order in which the backward pass produces the gradients, which each rank
# reads from its own graph. Should the graphs differ between ranks, then so may the orders, and
# gradients of equal shape would be added to those of other variables. So the last entry of a domain
# is empty and carries a digest of the order as its prescale factor, which is a part of the
# signature: ranks whose orders differ get a Mismatch, and not wrong sums.
_ORDER_LABEL = "(order of the variables)"


class GradientReducer:
    """Reduces gradients in domains of its own: one for each list of variables."""

    def __init__(self, domain: str, options: Options) -> None:
        self.domain = domain
        self.options = options
        self._plans: dict[tuple[int, ...], tuple[str, list[Any], grouping.Plan]] = {}
        self._local = threading.local()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients. Collective.

        gradients: one for each variable: a tensor, tf.IndexedSlices or None. variables: the same
        on all ranks in number and order.

        A gradient that is None on some ranks counts as zeros there. One that is None on all stays
        None in eager mode; in a graph, which is built before the ranks meet, it becomes zeros.
        """
        name, plan = self._plan(gradients, variables)
        return reduce_gradients(name, plan, gradients, variables, self.options)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While it lasts, on this thread, ``active`` is False: gradients are reduced already."""
        self._local.paused = True
        try:
            yield
        finally:
            self._local.paused = False

    @property
    def active(self) -> bool:
        return not getattr(self._local, "paused", False)

    def _plan(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[str, grouping.Plan]:
        """Made once for a list of variables: later graphs, and eager mode, keep to it."""
        identity = tuple(id(variable) for variable in variables)
        known = self._plans.get(identity)
        if known is None:
            number = len(self._plans)
            name = self.domain if number == 0 else f"{self.domain}.{number}"
            plan = make_plan(gradients, variables, self.options)
            known = self._plans[identity] = (name, list(variables), plan)
        return known[0], known[2]


def make_plan(
    gradients: Sequence[Any], variables: Sequence[Any], options: Options
) -> grouping.Plan:
    """Order and groups of the gradients, from the graph that produces them. Local."""
    entries = [
        grouping.Entry(id(v), label_of(v), _count(v) * tf.as_dtype(v.dtype).size) for v in variables
    ]
    order = graph.ready_order(gradients)
    return grouping.make_plan(entries, order, options.groups, basics.settings().group_bytes)


def reduce_gradients(
    name: str,
    plan: grouping.Plan,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    options: Options,
) -> list[Any]:
    """Reduces the gradients as the domain ``name``. Collective. See GradientReducer.reduce."""
    tensors, members, absent = [], [], []
    for position, i in enumerate(plan.order):
        tensor, member = _member(gradients[i], variables[i], options)
        tensors.append(tensor)
        members.append(member)
        if gradients[i] is None:
            absent.append(position)
    members.append(_order_member(plan.order))
    tensors.append(tf.zeros([0]))
    domain = _declare(name, members, plan, options)
    reduced, present = reduce_members(domain, tensors, absent)

    results: list[Any] = [None] * len(gradients)
    for position, i in enumerate(plan.order):
        if present is not None and position in absent and present[position] == 0:
            continue
        results[i] = reduced[position]
        if _stays_sparse(gradients[i], options):
            # Not before the reduction of the others has ended well: a gather waits for all ranks,
            # and none may begin it in a step that fails.
            with tf.control_dependencies([reduced[position]]):
                slices = tf.IndexedSlices(
                    tf.identity(gradients[i].values),
                    tf.identity(gradients[i].indices),
                    gradients[i].dense_shape,
                )
            label = f"{name}/{position}"
            results[i] = allreduce_slices(slices, options.op, 1.0, label, options.process_set)
    return results


def _declare(name: str, members: Sequence[Member], plan: grouping.Plan, options: Options) -> Domain:
    number = options.process_set.require_member(name)
    return declare(name, members, [*plan.ends[:-1], len(members)], number)


def _stays_sparse(gradient: Any, options: Options) -> bool:
    return isinstance(gradient, tf.IndexedSlices) and not options.sparse_as_dense


def _member(gradient: Any, variable: Any, options: Options) -> tuple[tf.Tensor, Member]:
    """What is submitted for one gradient."""
    label = label_of(variable)
    shape = tuple(-1 if d is None else int(d) for d in variable.shape)
    if gradient is None:
        tensor = tf.zeros(shape if -1 not in shape else tf.shape(variable), variable.dtype)
    elif _stays_sparse(gradient, options):
        # Stands for the slices, which are gathered later: fails with them, and tells a rank that
        # has a dense gradient apart.
        label, shape = f"{label} (IndexedSlices)", (0,)
        with tf.control_dependencies([gradient.values, gradient.indices]):
            tensor = tf.zeros([0], gradient.dtype)
    else:
        tensor = tf.convert_to_tensor(gradient)
    dtype = tensor.dtype.name
    factor = options.gradient_predivide_factor
    compressor = wire_of(options.compression, basics.settings().wire, label)
    return tensor, Member(
        label=label,
        op="allreduce",
        reduce_op=native_name(options.op, label),
        dtype=dtype,
        wire=compressor.wire_of(dtype),
        shape=shape,
        prescale=1.0 / factor,
        postscale=factor,
    )


def _order_member(order: Sequence[int]) -> Member:
    """See Note [Order of the entries]"""
    digest = zlib.crc32(",".join(map(str, order)).encode())
    return Member(_ORDER_LABEL, "allreduce", "float32", "float32", (0,), prescale=1.0 + digest)


def _count(variable: Any) -> int:
    count = 1
    for d in variable.shape:
        count *= d or 1
    return count
