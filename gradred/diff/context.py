"""Contexts: groups of ranks that communicate in a graph, with traffic and an order of their own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import tensorflow as tf
from gradred import basics
from gradred._native import core
from gradred.diff import token
from gradred.diff.node import as_number, contexts
from gradred.errors import InvalidArgument, Mismatch
from gradred.objects import allgather_object

__all__ = ["Context"]

_next_id = 0
_BOOLS = (bool, np.bool_)
# Groups of ranks, dims (None: each group in one row), periodic, name.
_Definition = tuple[
    tuple[tuple[int, ...], ...], "tuple[int, ...] | None", tuple[bool, ...], "str | None"
]


class Context:
    """A group of ranks whose operations run in one order. Collective over all ranks of the job.

    Ranks of a context are numbered from 0 in the order of their ranks in the job; roots, peers and
    neighbours are given in these numbers.
    """

    id: int
    name: str
    ranks: tuple[int, ...]
    dims: tuple[int, ...]
    periodic: tuple[bool, ...]

    def __init__(
        self,
        ranks: Iterable[int] | Iterable[Iterable[int]] | None = None,
        *,
        dims: Sequence[int] | None = None,
        periodic: bool | Sequence[bool] = False,
        name: str | None = None,
    ) -> None:
        """Makes a context, by the same call on all ranks of the job, members and others.

        What is wrong on one rank is an error on all.

        ranks: None: all of the job; some of them, ascending; or a list of such groups without a
        common rank: then each rank is in the context of its group. A rank in none gets a context
        that it cannot use (``included``). dims: sizes of a grid of the ranks, whose product is the
        number of ranks; the last coordinate runs fastest; None: all in one row. periodic: whether
        the last rank of a dimension has the first as its neighbour. name: for messages.

        Raises:
            InvalidArgument: ranks outside of the job, or twice; a grid that does not fit.
            Mismatch: the ranks do not make the same context.
            NotInitialized: before ``gradred.init()``.
        """
        self._open(lambda: _definition(ranks, dims, periodic, name))

    def _open(self, define: Callable[[], _Definition]) -> None:
        global _next_id
        mine, definition, wrong = core.rank(), None, ""
        try:
            definition = define()
        except Exception as error:  # which the other ranks are to raise as well
            wrong = str(error) or repr(error)
        notes = allgather_object((_next_id, definition, wrong), "diff.context")
        for rank, (_, theirs, refusal) in enumerate(notes):
            if refusal:
                raise InvalidArgument(f"rank {rank}: {refusal}")
            if theirs != notes[0][1]:
                raise Mismatch(
                    f"Context: the ranks make different contexts: rank 0: {notes[0][1]}, rank "
                    f"{rank}: {theirs} (groups of ranks, dims, periodic, name)"
                )
        assert definition is not None
        self._groups, self._grid, self.periodic, name = definition
        self.id = max(number for number, _, _ in notes)
        _next_id = self.id + 1
        self.name = f"context {self.id}" if name is None else name
        own = [group for group in self._groups if mine in group]
        self.ranks = own[0] if own else ()
        self.dims = self._grid or (len(self.ranks),)
        contexts[self.id] = self
        if own:
            settings = basics.settings()
            core.diff_open(
                self.id,
                self.name,
                self.ranks,
                -1 if settings.diff_checks == "all" else int(settings.diff_checks),
                settings.stall_warn_seconds,
                settings.stall_fail_seconds,
                settings.transport_timeout_seconds,
            )

    # --- Who is who; local ---

    @property
    def included(self) -> bool:
        """Whether this rank is a member."""
        return bool(self.ranks)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's number in the context. Raises InvalidArgument if it is no member."""
        self.require_member("rank")
        return self.ranks.index(core.rank())

    def require_member(self, what: str) -> None:
        """Raises InvalidArgument, naming ``what``, if this rank is no member."""
        if not self.included:
            raise InvalidArgument(
                f"{what} in context '{self.name}': rank {core.rank()} is no member of it"
            )

    @property
    def coordinates(self) -> tuple[int, ...]:
        """This rank's place in the grid."""
        return self.coordinates_of(self.rank)

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """The place of a rank in the grid."""
        return tuple(int(c) for c in np.unravel_index(rank, self.dims))

    def rank_at(self, coordinates: Sequence[int]) -> int | None:
        """The rank at a place of the grid; None: there is none, beyond an end that is one."""
        place = []
        for at, extent, wrap in zip(coordinates, self.dims, self.periodic, strict=True):
            if not wrap and not 0 <= at < extent:
                return None
            place.append(at % extent)
        return int(np.ravel_multi_index(place, self.dims))

    def neighbour(self, dim: int, displacement: int = 1) -> int | None:
        """The rank ``displacement`` places further along a dimension; None: there is none."""
        place = list(self.coordinates)
        place[dim] += displacement
        return self.rank_at(place)

    def sub(self, keep: Sequence[bool], name: str | None = None) -> Context:
        """The part of the grid that shares this rank's coordinates in the dimensions not kept.

        keep: for each dimension, whether the new grid has it. Collective over all ranks of the job.
        """
        context = Context.__new__(Context)
        context._open(lambda: self._parts(keep, name))
        return context

    def _parts(self, keep: Sequence[bool], name: str | None) -> _Definition:
        grid, periodic = self._grid, self.periodic
        if len(keep) != len(periodic):
            raise InvalidArgument(
                f"sub of context '{self.name}': keep={list(keep)}: expected one value for each of "
                f"the {len(periodic)} dimensions"
            )
        parts: dict[tuple[int, ...], list[int]] = {}
        for number, group in enumerate(self._groups):
            for rank, place in zip(group, np.ndindex(*(grid or (len(group),))), strict=True):
                left = [at for at, kept in zip(place, keep, strict=True) if not kept]
                parts.setdefault((number, *left), []).append(rank)
        if not any(keep):
            grid, periodic = (1,), (False,)
        elif grid is not None:
            grid = tuple(itertools.compress(grid, keep))
            periodic = tuple(itertools.compress(periodic, keep))
        return tuple(map(tuple, parts.values())), grid, periodic, name

    # --- Order: see gradred/diff/token.py; local, nothing is sent ---

    def begin(self, *xs: Any) -> None:
        """Says what will be differentiated by, before the operations that depend on it.

        xs: tensors and variables, or structures of them. Needed where some rank's operations do not
        depend on them all, as one that only receives: or its adjoints would not run, and the others
        would wait for them. A cotangent of zeros is added to those of ``xs``.
        """
        self.require_member("begin")
        token.begin(self.id, _tensors(xs))

    def end(self, x: Any) -> Any:
        """``x``, a tensor or a structure of them, which depends on all operations so far.

        What is differentiated goes through it, so that the adjoints of all operations run.
        """
        self.require_member("end")
        last = token.last(self.id)
        if last is None:
            return x
        return tf.nest.map_structure(lambda t: token.end(self.id, tf.convert_to_tensor(t), last), x)

    def function(self, python_function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """As ``tf.function``, for functions that are called from others or differentiated outside.

        The token goes in and out with the arguments and results, so that the order holds over the
        calls of several such functions. options: those of ``tf.function``.
        """
        if python_function is None:
            return lambda function: self.function(function, **options)
        function = python_function

        def with_token(before: tf.Tensor, args: Any, kwargs: Any) -> Any:
            token.set_last(self.id, before)
            results = function(*args, **kwargs)
            return results, token.last(self.id)

        traced = tf.function(with_token, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.require_member("function")
            token.begin(self.id, _tensors((args, kwargs)))
            results, after = traced(token.last(self.id), args, kwargs)
            token.set_last(self.id, after)
            return self.end(results)

        return call

    def while_loop(
        self,
        cond: Callable[..., Any],
        body: Callable[..., Any],
        loop_vars: Sequence[Any],
        shape_invariants: Sequence[Any] | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """As ``tf.while_loop``, with operations of the context in the body. Returns a tuple.

        All ranks must run it equally often.
        """

        def go_on(_: tf.Tensor, *values: Any) -> Any:
            return cond(*values)

        def step(before: tf.Tensor, *values: Any) -> Any:
            token.set_last(self.id, before)
            results = body(*values)
            results = results if isinstance(results, list | tuple) else (results,)
            return token.last(self.id), *results

        if shape_invariants is not None:
            options["shape_invariants"] = (tf.TensorShape(()), *shape_invariants)
        before = self._token(loop_vars)
        after, *results = tf.while_loop(go_on, step, (before, *loop_vars), **options)
        token.set_last(self.id, after)
        return tuple(results)

    def cond(self, predicate: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        """As ``tf.cond``, with operations of the context in the branches.

        ``predicate`` must be the same on all ranks, or their operations must fit each other.
        """
        before = self._token([])

        def branch(function: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                token.set_last(self.id, before)
                return function(), token.last(self.id)

            return run

        results, after = tf.cond(predicate, branch(true_fn), branch(false_fn))
        token.set_last(self.id, after)
        return results

    def _token(self, xs: Any) -> tf.Tensor:
        last = token.last(self.id)
        return token.begin(self.id, _tensors(xs)) if last is None else last

    def close(self) -> None:
        """Ends the context. Local; operations of the other ranks fail from then on.

        At ``gradred.shutdown()`` all contexts are closed.
        """
        token.forget(self.id)
        core.diff_close(self.id, "close() was called")

    def __repr__(self) -> str:
        return f"Context(name={self.name!r}, ranks={list(self.ranks)}, dims={self.dims})"


def _definition(
    ranks: Any, dims: Sequence[int] | None, periodic: Any, name: str | None
) -> _Definition:
    """What the ranks of the job must agree on, checked."""
    groups = _groups_of(ranks, core.size())
    grid = None if dims is None else tuple(as_number(d, "Context: dims") for d in dims)
    count = 1 if grid is None else len(grid)
    wrap = (bool(periodic),) * count if isinstance(periodic, _BOOLS) else tuple(map(bool, periodic))
    for group in groups:
        if grid is not None and (len(group) != math.prod(grid) or min(grid, default=0) < 1):
            raise InvalidArgument(
                f"Context: a grid of {grid} has {math.prod(grid)} cells, expected one for each of "
                f"the {len(group)} ranks {list(group)}"
            )
    if len(wrap) != count:
        raise InvalidArgument(
            f"Context: periodic={wrap}: expected one value, or one for each of the {count} "
            "dimensions"
        )
    return groups, grid, wrap, name


def _groups_of(ranks: Any, size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a context, each ascending."""
    listed: list[Any] = list(range(size)) if ranks is None else list(ranks)
    nested = bool(listed) and isinstance(listed[0], Iterable)
    groups = tuple(
        tuple(as_number(rank, "Context: ranks") for rank in group)
        for group in (listed if nested else [listed])
    )
    members = list(itertools.chain(*groups))
    if (
        not all(groups)
        or len(set(members)) != len(members)
        or any(
            list(group) != sorted(group) or group[0] < 0 or group[-1] >= size for group in groups
        )
    ):
        raise InvalidArgument(
            f"Context: ranks={ranks!r}: expected ascending ranks below {size}, or groups of them "
            "without a common rank"
        )
    return groups


def _tensors(structure: Any) -> list[tf.Tensor]:
    """The floating tensors in a structure; variables are read."""
    tensors = []
    for value in tf.nest.flatten(structure):
        if isinstance(value, tf.Variable) or tf.is_tensor(value):
            tensor = tf.convert_to_tensor(value)
            if tensor.dtype.is_floating:
                tensors.append(tensor)
    return tensors
