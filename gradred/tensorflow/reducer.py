"""Reducing the gradients of a list of variables: what optimizers and tapes share."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from gradred import basics, grouping, plan_file
from gradred.arrays import DTYPES
from gradred.compression import wire_of
from gradred.errors import InvalidArgument
from gradred.reduce_ops import native_name
from gradred.tensorflow import graph
from gradred.tensorflow.accumulation import Accumulation
from gradred.tensorflow.native import abandon
from gradred.tensorflow.ops import Domain, Member, declare, reduce_members
from gradred.tensorflow.options import Options
from gradred.tensorflow.sparse import COUNTS, Slices, slices_of
from gradred.tensorflow.variables import LocalVariables, label_of, variable_key

__all__ = ["GradientReducer", "abandon_gradients", "reduce_gradients"]

logger = logging.getLogger("gradred")


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
    """Reduces gradients in domains of its own: one for each list of variables.

    domain: asked for the first one's name when it is needed. passes: calls of ``step`` that are
    summed up for one reduction. average_passes: divide by their number. on_new: called with each
    Accumulation and its number, to save it with the optimizer.
    """

    def __init__(
        self,
        domain: Callable[[], str],
        options: Options,
        passes: int = 1,
        average_passes: bool = False,
    ) -> None:
        self._make_domain = domain
        self.options = options
        self.passes = passes
        self.average_passes = average_passes
        self.on_new: Callable[[Accumulation, int], None] = lambda *_: None
        self.local = LocalVariables()
        # By the variables' keys, which stay theirs as long as the variables are held.
        self._known: dict[tuple[int, ...], _Known] = {}
        self._lock = threading.Lock()  # of _known and _domain
        self._thread = threading.local()

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Reduces gradients and gives them to ``apply``. Collective.

        With several passes the sums of that many calls are reduced; ``skip`` is called in place of
        ``apply`` until then. Returns what they return. Other arguments: see ``reduce``.
        """

        missing: dict[int, tf.Tensor] = {}

        def finish(reduced: list[Any]) -> Any:
            with self.applying(missing):
                return apply(reduced)

        if self.passes == 1:
            return finish(self.reduce(gradients, variables, missing))
        accumulation = self.accumulation(variables)
        return accumulation.step(
            accumulation.is_last(),
            gradients,
            lambda sums, made: self.reduce_sums(sums, made, variables),
            finish,
            skip,
        )

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        missing: dict[int, tf.Tensor] | None = None,
    ) -> list[Any]:
        """The reduced gradients. Collective.

        gradients: one for each variable: a tensor, tf.IndexedSlices or None. variables: the same
        on all ranks in number and order, but for local ones, whose gradients stay here.

        A gradient that is None on some ranks counts as zeros there. One that is None on all stays
        None in eager mode; in a graph, which is built before the ranks meet, it becomes zeros.
        missing: see ``reduce_gradients``.
        """
        # One function may update several times: its reductions are not ordered among themselves.
        name = graph.unique(graph.of_set(self._know(variables).name, self.options.process_set))
        local = self.local.keys()
        reduced = reduce_gradients(name, gradients, variables, self.options, local, missing)
        return [_divided(g, self.passes if self.average_passes else 1) for g in reduced]

    def reduce_sums(
        self, sums: Sequence[Any], made: tf.Tensor, variables: Sequence[Any]
    ) -> list[Any]:
        """As ``reduce``, of the sums of an Accumulation. Collective.

        Raises Mismatch where ranks differ over ``made``: one has restored sums, and others not.
        """
        agreed = self._agree(made, variables)
        reduced = self.reduce(sums, variables)
        if tf.executing_eagerly():
            return reduced
        with tf.control_dependencies(agreed):
            return [tf.identity(gradient) for gradient in reduced]

    def _agree(self, made: tf.Tensor, variables: Sequence[Any]) -> list[tf.Tensor]:
        local = self.local.keys()
        if all(variable_key(variable) in local for variable in variables):
            return []
        name = f"{self._know(variables).name}.passes"
        name = graph.unique(graph.of_set(name, self.options.process_set))
        if tf.executing_eagerly():
            name += ".eager"
        # The number travels as a length: lengths that differ are a Mismatch that names the ranks.
        # It has a domain of its own, as one whose lengths are not known starts late.
        label = "passes since the last update or restored checkpoint"
        member = Member(label, "allreduce", "uint8", "uint8", (-1,), "max")
        domain = declare(name, [member], [], self.options.process_set.require_member(name))
        return reduce_members(domain, [tf.zeros([made], tf.uint8)])[0]

    def accumulation(self, variables: Sequence[Any]) -> Accumulation:
        """The sums for a list of variables. Local."""
        known = self._know(variables)
        if known.accumulation is None:
            with tf.init_scope():
                known.accumulation = Accumulation(self.passes, variables)
                self.on_new(known.accumulation, list(self._known.values()).index(known))
        return known.accumulation

    @contextmanager
    def applying(self, missing: dict[int, tf.Tensor] | None = None) -> Iterator[None]:
        """While it lasts, on this thread, ``active`` is False: gradients are reduced already.

        missing: see ``reduce_gradients``; for the method of that name.
        """
        self._thread.missing = missing or {}
        try:
            yield
        finally:
            self._thread.missing = None

    @property
    def active(self) -> bool:
        return getattr(self._thread, "missing", None) is None

    def missing(self, variable: Any) -> tf.Tensor | None:
        """While ``applying``: how many ranks brought the variable's gradient; None: this one."""
        return (getattr(self._thread, "missing", None) or {}).get(variable_key(variable))

    @functools.cached_property
    def _domain(self) -> str:
        return self._make_domain()

    def _know(self, variables: Sequence[Any]) -> _Known:
        identity = tuple(variable_key(variable) for variable in variables)
        with self._lock:
            known = self._known.get(identity)
            if known is None:
                number = len(self._known)
                name = self._domain if number == 0 else f"{self._domain}.{number}"
                known = self._known[identity] = _Known(name, list(variables))
            return known


@dataclass
class _Known:
    """A list of variables that was reduced before, and its domain."""

    name: str
    variables: list[Any]
    accumulation: Accumulation | None = None


def make_plans(
    name: str, gradients: Sequence[Any], variables: Sequence[Any], options: Options
) -> Plans:
    """The plans of a call, for its domain. Local."""
    entries = [
        grouping.Entry(variable_key(v), label_of(v), _count(v) * tf.as_dtype(v.dtype).size)
        for v in variables
    ]
    settings = basics.settings()
    unset = options.groups is None or options.groups == 0
    groups = grouping.parse(settings.groups) if unset else options.groups
    limit = settings.group_bytes
    backwards = list(reversed(range(len(entries))))
    listed = grouping.make_plan(entries, backwards, groups, limit, variable_key)
    planned = groups == "auto" and len(entries) > 1
    if planned and settings.plan:
        saved = _saved_plan(settings.plan, name, [_count(variables[i]) for i in listed.order])
        if saved is not None:
            return Plans(listed, saved, False)
    if tf.executing_eagerly() or len(entries) < 2:
        return Plans(listed, None, planned)
    order = graph.ready_order(gradients)
    produced = grouping.make_plan(entries, order, groups, limit, variable_key)
    position_of = {i: position for position, i in enumerate(listed.order)}
    wish = grouping.Plan(tuple(position_of[i] for i in produced.order), produced.ends)
    return Plans(listed, wish, planned)


def _saved_plan(path: str, name: str, counts: list[int]) -> grouping.Plan | None:
    """The plan of the job's file for a domain with entries of these sizes, if there is one."""
    domain = plan_file.of_job().get(name)
    if domain is None:
        why = "has no such domain"
    elif len(domain["counts"]) != len(counts) or any(
        # Of a sparse gradient the domain has its counts.
        a not in (COUNTS, b)
        for a, b in zip(domain["counts"], counts, strict=True)
    ):
        why = "has it with other tensors"
    else:
        return grouping.Plan(tuple(domain["order"]), tuple(domain["group_ends"]))
    logger.warning("GRADRED_PLAN=%s: no plan for '%s': the file %s", path, name, why)
    return None


def reduce_gradients(
    name: str,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    options: Options,
    local: frozenset[int] = frozenset(),
    missing: dict[int, tf.Tensor] | None = None,
) -> list[Any]:
    """Reduces the gradients as the domain ``name``. Collective. See GradientReducer.reduce.

    local: keys of variables whose gradients are not reduced, only scaled. missing: gets, in a
    graph, how many ranks brought a gradient that is None here, by the key of the variable.
    """
    shared = [i for i, v in enumerate(variables) if variable_key(v) not in local]
    reduced: dict[int, Any] = {}
    if shared:
        some = [gradients[i] for i in shared], [variables[i] for i in shared]
        reduced = dict(zip(shared, _reduce_shared(name, *some, options, missing), strict=True))
    divisor = 1
    if len(shared) < len(gradients) and options.scale_local_gradients:
        divisor = options.process_set.size()
    return [reduced[i] if i in reduced else _divided(g, divisor) for i, g in enumerate(gradients)]


def abandon_gradients(
    name: str,
    variables: Sequence[Any],
    options: Options,
    local: frozenset[int],
    reason: str,
) -> None:
    """In eager mode, instead of reduce_gradients: this rank has no gradients to bring. Local."""
    variables = [v for v in variables if variable_key(v) not in local]
    if variables and basics.is_initialized():
        batch = _prepare(name, [None] * len(variables), variables, options)
        abandon(batch.domain.key, reason)


@dataclass(frozen=True)
class _Batch:
    """What is submitted for a list of gradients, in the order of the domain."""

    domain: Domain
    order: Sequence[int]  # positions of the gradients
    tensors: list[tf.Tensor]
    slices: list[Slices | None]  # of gradients that stay sparse
    dense: list[Member]  # how each travels, or would if it were dense
    absent: list[int]  # places in the order


def _reduce_shared(
    name: str,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    options: Options,
    missing: dict[int, tf.Tensor] | None,
) -> list[Any]:
    batch = _prepare(name, gradients, variables, options)
    reduced, present = reduce_members(batch.domain, batch.tensors, batch.absent)
    results: list[Any] = [None] * len(gradients)
    for place, i in enumerate(batch.order):
        slices = batch.slices[place]
        if place in present and tf.executing_eagerly():
            if present[place] == 0:
                continue
        elif place in present and missing is not None:
            missing[variable_key(variables[i])] = present[place]
        if slices is None:
            results[i] = reduced[place]
        elif not tf.executing_eagerly() or reduced[place][-1] > 0:  # brought by any rank
            label = f"{batch.domain.name}/{place}"
            results[i] = slices.reduce(
                reduced[place], batch.dense[place], label, options.process_set
            )
    return results


def _prepare(
    name: str, gradients: Sequence[Any], variables: Sequence[Any], options: Options
) -> _Batch:
    if tf.executing_eagerly():
        name += ".eager"  # graphs have agreed on an order under the plain name
    number = options.process_set.require_member(name)
    plans = make_plans(name, gradients, variables, options)
    tensors: list[tf.Tensor] = []
    members: list[Member] = []
    all_slices: list[Slices | None] = []
    dense: list[Member] = []
    absent: list[int] = []
    for place, i in enumerate(plans.listed.order):
        gradient, variable = gradients[i], variables[i]
        member = _member(gradient, variable, options)
        slices = None
        if not options.sparse_as_dense and not isinstance(gradient, tf.Tensor):
            slices = slices_of(gradient, variable, member)
        dense.append(member)
        all_slices.append(slices)
        if slices is not None:
            label = f"{member.label} (IndexedSlices)"
            members.append(Member(label, "allreduce", "int64", "int64", (COUNTS,)))
            tensors.append(slices.counts)
            continue
        members.append(member)
        if gradient is None:
            absent.append(place)
            shape = member.shape if -1 not in member.shape else tf.shape(variable)
            tensors.append(tf.zeros(shape, member.dtype))
        else:
            tensors.append(tf.convert_to_tensor(gradient))
    domain = declare(name, members, plans.listed.ends, number, plans.wish, plans.planned)
    return _Batch(domain, plans.listed.order, tensors, all_slices, dense, absent)


def _member(gradient: Any, variable: Any, options: Options) -> Member:
    """How a gradient travels, if it is or becomes dense."""
    label = label_of(variable)
    dtype = (variable if gradient is None else gradient).dtype
    dtype = tf.as_dtype(dtype).name
    if dtype not in DTYPES:
        raise InvalidArgument(
            f"the gradient of '{label}' is of dtype {dtype}: expected one of {', '.join(DTYPES)}"
        )
    factor = options.gradient_predivide_factor
    compressor = wire_of(options.compression, basics.settings().wire, label)
    return Member(
        label=label,
        op="allreduce",
        reduce_op=native_name(options.op, label),
        dtype=dtype,
        wire=compressor.wire_of(dtype),
        shape=tuple(-1 if d is None else int(d) for d in variable.shape),
        prescale=1.0 / factor,
        postscale=factor,
    )


def _divided(gradient: Any, divisor: int) -> Any:
    if gradient is None or divisor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = _divided(gradient.values, divisor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.constant(divisor, gradient.dtype)


def _count(variable: Any) -> int:
    count = 1
    for d in variable.shape:
        count *= d or 1
    return count
