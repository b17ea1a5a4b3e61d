"""Reducing the gradients of a list of variables: what optimizers and tapes share."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from gradred import basics, grouping, plan_file
from gradred.compression import wire_of
from gradred.errors import InvalidArgument, Unsupported
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp, native_name
from gradred.tensorflow import graph
from gradred.tensorflow.functions import allreduce_slices, label_of
from gradred.tensorflow.native import abandon
from gradred.tensorflow.ops import Member, declare, reduce_members

__all__ = ["GradientReducer", "Options"]

logger = logging.getLogger("gradred")


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


@dataclass(frozen=True)
class Plans:
    """Order and groups of a list of variables.

    listed: as the list has them, the last first: alike on all ranks. wish: positions of ``listed``
    in the order in which this rank's graph produces the gradients; None outside of graphs. planned:
    order and groups change when they have been measured. Ranks that wish the same get it: Note
    [Plans of a domain] in native/src/engine/plan_book.h.
    """

    listed: grouping.Plan
    wish: grouping.Plan | None
    planned: bool


class GradientReducer:
    """Reduces gradients in domains of its own: one for each list of variables."""

    def __init__(self, domain: str, options: Options) -> None:
        self.domain = domain
        self.options = options
        # By the variables' ids, which stay theirs as long as the variables are held.
        self._known: dict[tuple[int, ...], tuple[str, list[Any]]] = {}
        self._local = threading.local()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients. Collective.

        gradients: one for each variable: a tensor, tf.IndexedSlices or None. variables: the same
        on all ranks in number and order.

        A gradient that is None on some ranks counts as zeros there. One that is None on all stays
        None in eager mode; in a graph, which is built before the ranks meet, it becomes zeros.
        """
        identity = tuple(id(variable) for variable in variables)
        known = self._known.get(identity)
        if known is None:
            number = len(self._known)
            name = self.domain if number == 0 else f"{self.domain}.{number}"
            known = self._known[identity] = (name, list(variables))
        return reduce_gradients(known[0], gradients, variables, self.options)

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


def make_plans(
    name: str, gradients: Sequence[Any], variables: Sequence[Any], options: Options
) -> Plans:
    """The plans of a call, for its domain. Local."""
    entries = [
        grouping.Entry(id(v), label_of(v), _count(v) * tf.as_dtype(v.dtype).size) for v in variables
    ]
    settings = basics.settings()
    groups = options.groups or grouping.parse(settings.groups)
    limit = settings.group_bytes
    backwards = list(reversed(range(len(entries))))
    listed = grouping.make_plan(entries, backwards, groups, limit)
    planned = groups == "auto" and len(entries) > 1
    if planned and settings.plan:
        saved = _saved_plan(settings.plan, name, [_count(variables[i]) for i in listed.order])
        if saved is not None:
            return Plans(listed, saved, False)
    if tf.executing_eagerly() or len(entries) < 2:
        return Plans(listed, None, planned)
    order = graph.ready_order(gradients)
    produced = grouping.make_plan(entries, order, groups, limit)
    position_of = {i: position for position, i in enumerate(listed.order)}
    wish = grouping.Plan(tuple(position_of[i] for i in produced.order), produced.ends)
    return Plans(listed, wish, planned)


def _saved_plan(path: str, name: str, counts: list[int]) -> grouping.Plan | None:
    """The plan of a file for a domain with entries of these sizes; None if there is none.

    Raises InvalidArgument for a file that is none of plans.
    """
    domain = _plan_file(path).get(name)
    # Sparse gradients travel as an entry without elements.
    fits = domain is not None and len(domain["counts"]) == len(counts)
    if not fits or any(a not in (0, b) for a, b in zip(domain["counts"], counts, strict=True)):
        why = "has no such domain" if domain is None else "has it with other tensors"
        logger.warning("GRADRED_PLAN=%s: no plan for '%s': the file %s", path, name, why)
        return None
    return grouping.Plan(tuple(domain["order"]), tuple(domain["group_ends"]))


@functools.cache
def _plan_file(path: str) -> dict[str, dict[str, Any]]:
    return plan_file.read(path)


def reduce_gradients(
    name: str, gradients: Sequence[Any], variables: Sequence[Any], options: Options
) -> list[Any]:
    """Reduces the gradients as the domain ``name``. Collective. See GradientReducer.reduce."""
    if tf.executing_eagerly():
        name += ".eager"  # graphs have agreed on an order under the plain name
    plans = make_plans(name, gradients, variables, options)
    order = plans.listed.order
    tensors, members, absent = [], [], []
    for position, i in enumerate(order):
        tensor, member = _member(gradients[i], variables[i], options)
        tensors.append(tensor)
        members.append(member)
        if gradients[i] is None:
            absent.append(position)
    number = options.process_set.require_member(name)
    domain = declare(name, members, plans.listed.ends, number, plans.wish, plans.planned)
    reduced, present = reduce_members(domain, tensors, absent)

    results: list[Any] = [None] * len(gradients)
    for position, i in enumerate(order):
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


def abandon_gradients(name: str, variables: Sequence[Any], options: Options, reason: str) -> None:
    """In eager mode, instead of reduce_gradients: this rank has no gradients to bring. Local."""
    if not basics.is_initialized():
        return
    nothing = [None] * len(variables)
    name += ".eager"
    plans = make_plans(name, nothing, variables, options)
    members = [_member(None, variables[i], options)[1] for i in plans.listed.order]
    number = options.process_set.require_member(name)
    domain = declare(name, members, plans.listed.ends, number, plans.wish, plans.planned)
    abandon(domain.key, reason)


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


def _count(variable: Any) -> int:
    count = 1
    for d in variable.shape:
        count *= d or 1
    return count
