"""Running the entries of a domain: Begin, Submit, Join, Wait in graphs, one op in eager mode."""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf
from gradred._native import core
from gradred.grouping import Plan
from gradred.tensorflow import graph
from gradred.tensorflow.native import native_errors, ops

__all__ = ["Domain", "Member", "declare", "reduce_members", "run_alltoall", "run_members"]


@dataclass(frozen=True)
class Member:
    """One entry of a domain. Fields: see EntrySpec in native/src/engine/spec.h."""

    label: str
    op: str
    dtype: str
    wire: str
    shape: tuple[int, ...]  # -1: known when it runs
    reduce_op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0


@dataclass(frozen=True)
class Domain:
    """A declared domain: its name, and the key under which the ops find its spec."""

    name: str
    key: str
    members: tuple[Member, ...]


_declared: dict[tuple[Any, ...], Domain] = {}  # by functions, which keep the keys
# By graphs of tf.compat.v1: none shares a key with another. See Note [Instances] in
# native/tf/instances.h.
_of_sessions: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[Any, ...], Domain]] = (
    weakref.WeakKeyDictionary()
)
# By eager calls, the latest last: names and shapes may change from call to call.
_eager: collections.OrderedDict[tuple[Any, ...], Domain] = collections.OrderedDict()
_MOST_EAGER = 1024
_lock = threading.Lock()
_numbers = itertools.count()
# Keys of eager calls that were forgotten.
_free: collections.deque[str] = collections.deque(maxlen=2 * _MOST_EAGER)


def declare(
    name: str,
    members: Sequence[Member],
    group_ends: Sequence[int],
    process_set: int,
    wish: Plan | None = None,
    planned: bool = False,
) -> Domain:
    """Makes a domain's spec known to the native core; the same arguments give the same Domain.

    wish: the order (of places in ``members``) and groups that this rank proposes. planned: order
    and groups are to be measured and changed while it runs. See Note [Plans of a domain] in
    native/src/engine/plan_book.h.
    """
    identity = (name, tuple(members), tuple(group_ends), process_set, wish, planned)
    eager = tf.executing_eagerly()
    session = None if eager else graph.of_session()
    with _lock:
        if session is None:
            domains = _eager if eager else _declared
        elif session in _of_sessions:
            domains = _of_sessions[session]
        else:
            domains = _of_sessions[session] = {}
            weakref.finalize(session, _forget_all, domains).atexit = False
        domain = domains.get(identity)
        if domain is not None:
            if eager:
                _eager.move_to_end(identity)
            return domain
        # See Note [Names of specs] in native/tf/domains.h.
        mark = "#" if session is None else "#s"
        key = f"{name}{mark}{next(_numbers)}"
        alias = _alias() if eager else ""
        domain = Domain(name, alias or key, tuple(members))
        entries = [{**asdict(m), "shape": list(m.shape)} for m in members]
        for listed, short in ((key, alias), (name, "")):  # under the plain name for gradred.plan()
            core.register_spec(
                listed,
                process_set,
                entries,
                list(group_ends),
                list(wish.order) if wish else [],
                list(wish.ends) if wish else [],
                planned,
                short,
            )
        if eager:
            weakref.finalize(domain, _forget, key, alias).atexit = False
        domains[identity] = domain
        if len(_eager) > _MOST_EAGER:
            _eager.popitem(last=False)
    return domain


def _alias() -> str:
    """A key of an eager call: TensorFlow keeps a kernel for each, so they are used again."""
    # Where eager ops wait in a queue, one of them may have a key that was forgotten since.
    if _free and tf.config.experimental.get_synchronous_execution():
        return _free.pop()
    return f"#e{next(_numbers)}"


def _forget(key: str, alias: str) -> None:
    """When no call has the domain any more."""
    core.forget_spec(key, alias)
    _free.append(alias)


def _forget_all(domains: dict[tuple[Any, ...], Domain]) -> None:
    """Their graph is gone, and its sessions, which hold it."""
    for domain in domains.values():
        core.forget_spec(domain.key)


def _numbered() -> AbstractContextManager[Any]:
    """For ops that have a number in their graph: see Note [Instances] in native/tf/instances.h."""
    return nullcontext() if tf.executing_eagerly() else tf.device("CPU:0")


def static_shape(tensor: tf.Tensor) -> tuple[int, ...] | None:
    """A tensor's shape with -1 for what is not known, or None if not even the rank is."""
    if tensor.shape.rank is None:
        return None
    return tuple(-1 if d is None else int(d) for d in tensor.shape.as_list())


def reduce_members(
    domain: Domain, tensors: Sequence[tf.Tensor], absent: Sequence[int] = ()
) -> tuple[list[tf.Tensor], dict[int, Any]]:
    """Runs a domain of allreduces. Collective.

    tensors: one for each member, in order; of a position in ``absent`` only the shape matters.

    Returns: the reduced tensors, and how many ranks brought those in ``absent``, by position: int,
    in a graph int32 tensors.
    """
    graph.refuse_xla(f"a reduction of '{domain.name}'")
    if tf.executing_eagerly():
        results, counts = run_members(domain, tensors, absent)
        return results, dict(zip(absent, counts.numpy()[list(absent)], strict=True))
    # See Note [Begin, Submit, Join, Wait] in native/tf/call_table.h.
    with _numbered():
        begin = ops.gradred_begin(domain=domain.key)
    graph.run_independently(begin.op)
    if len(tensors) == 1 and not absent:
        only = ops.gradred_reduce(tensors[0], begin).reduced
        graph.run_independently(only.op)
        return [only], {}
    submits = []
    for position, tensor in enumerate(tensors):
        submit = ops.gradred_submit(tensor, begin, position=position, absent=position in absent)
        graph.run_independently(submit.ticket.op)
        submits.append(submit)
    joined = ops.gradred_join([begin, *(submit.ticket for submit in submits)])
    graph.run_independently(joined.op)
    reduced = [
        ops.gradred_wait(submit.staged, joined, position=position)
        for position, submit in enumerate(submits)
    ]
    present = {
        position: ops.gradred_present(reduced[position], joined, position=position)
        for position in absent
    }
    return reduced, present


def run_members(
    domain: Domain,
    tensors: Sequence[tf.Tensor],
    absent: Sequence[int] = (),
    ordered: bool = False,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Runs a domain of any collectives as one op. Collective. See reduce_members.

    ordered: in a graph, keep the place among the stateful ops of the program.
    """
    graph.refuse_xla(f"{domain.members[0].op} of '{domain.members[0].label}'")
    with _numbered(), native_errors():
        results, present = ops.gradred_run_list(
            list(tensors), domain=domain.key, absent=list(absent)
        )
    if not ordered and not tf.executing_eagerly():
        graph.run_independently(present.op)
    return list(results), present


def run_alltoall(
    domain: Domain, tensor: tf.Tensor, splits: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs a domain of one alltoall. Collective.

    splits: int64 [ranks], or None: equal parts. Returns: the rows received, and their numbers by
    rank, int64 [ranks].
    """
    graph.refuse_xla(f"alltoall of '{domain.members[0].label}'")
    with _numbered(), native_errors():
        result = ops.gradred_all_to_all(
            tensor,
            tf.zeros([0], tf.int64) if splits is None else splits,
            domain=domain.key,
            equal=splits is None,
        )
    if not tf.executing_eagerly():
        graph.run_independently(result.result.op)
    return result.result, result.received_splits
