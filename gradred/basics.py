"""Beginning and end: opening the world of ranks, leaving it, and who is who in it."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradred
from gradred import config, errors, horovod_env, plan_file, uncaught
from gradred._native import core
from gradred.errors import Error, InvalidArgument, NotInitialized
from gradred.process_sets import ProcessSet, check_sets, on_init, on_shutdown

__all__ = [
    "cross_rank",
    "cross_size",
    "describe",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "plan",
    "rank",
    "save_plan",
    "settings",
    "shutdown",
    "size",
]

logger = logging.getLogger("gradred")


@dataclass
class _State:
    """Of this process."""

    settings: config.Settings | None = None
    communicator: Any = None  # kept alive: its handle is in use
    cause: tuple[str, str] | None = None  # kind and text of the engine error; final
    forked_from: str = ""  # of a forked child: its parent had called init()
    mpi_is_ours: bool = False  # an init() of ours has initialised MPI
    mpi_of_others: bool = False  # MPI was initialised before us: its owner finalizes it
    prepared_pid: int = 0  # hooks and log thread are in place
    log_thread: threading.Thread | None = None
    reported: set[str] = field(default_factory=set)  # of variables that mean nothing here


_state = _State()
_lock = threading.RLock()


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Opens the world of ranks and starts the engine. Collective.

    comm: None: all ranks of the job; a list of the job's ranks, which are numbered in its order; or
    an mpi4py communicator, whose ranks are used (it is duplicated). process_sets: sets to register,
    the same list on all ranks; "dynamic" is as none, since sets can be added at any time. Settings
    come from the environment: see ``gradred.config``, and ``gradred.horovod_env`` for Horovod's. At
    interpreter exit ``shutdown`` runs by itself.

    While there is an engine it does nothing, and ignores its arguments. After ``shutdown`` it may
    be called again, after an engine error not.

    Raises:
        InvalidArgument: a setting out of range, a bad communicator or process set, this rank is
            not in the list, the launcher and MPI disagree on the number of ranks.
        Mismatch: settings differ between ranks.
        Timeout, TransportError, Unsupported: ranks or libraries were not found.
        NotInitialized: in a forked child.
    """
    with _lock:
        _refuse_in_child()
        if core.is_initialized():
            _refuse_after_failure(core.failure())
            return
        _refuse_after_failure(_state.cause)
        horovod = horovod_env.translate(os.environ)
        values, rubbish = config.load_valid(horovod.environ)
        # What is wrong on this rank: the others should not wait for it in vain, so it meets them
        # all the same. See Note [Failures in init] in native/src/comm/world.cpp.
        problems = [text for text in (horovod.problem, rubbish) if text]
        ranks, sets, plans = _ranks_of(None), [], ""
        try:
            ranks = _ranks_of(comm)
            sets = check_sets(process_sets or ())
            plans = plan_file.read_for_job(values.plan)
        except InvalidArgument as error:
            problems.append(str(error))
        _prepare(values, horovod.environ)
        options = {**dataclasses.asdict(values), "prefix": sys.prefix, **ranks}
        options["problem"] = "; ".join(problems)
        had_mpi = core.mpi_library() is not None
        _state.mpi_of_others = had_mpi and not _state.mpi_is_ours
        extra: dict[str, Any] = {"gradred": gradred.__version__}
        if not problems:
            extra["process_sets of init()"] = [s.ranks or "of a communicator" for s in sets]
            extra["the file of GRADRED_PLAN (its digest)"] = plans
        try:
            notes = core.open_world(options, config.job_text(values, extra))
        except Error as error:
            if core.mpi_is_over():
                _state.cause = (error.kind, str(error))
            raise
        finally:
            _state.mpi_is_ours |= not had_mpi and core.mpi_library() is not None
        try:
            config.check_equal(notes, horovod_env.sources())
        except Error:
            core.close_world()
            raise
        core.start_engine(options)
        _state.settings, _state.communicator = values, comm
        _point_mpi4py_at_our_library()
        _report_once(horovod.notes)
        try:
            on_init(sets, comm)
        except Error as error:  # alike on all ranks, as the sets are
            shutdown(f"its init() failed: {error}")
            raise
        if values.timeline:
            from gradred.timeline import start_at_init

            start_at_init(values.timeline, values.timeline_mark_cycles)


def shutdown(reason: str = "shutdown() was called") -> None:
    """Ends the engine. Collective: waits until all ranks shut down. Does nothing without ``init``.

    Work that others wait for fails there with Abandoned, which names this rank and ``reason``.
    After an engine error it only lets go, without waiting.
    """
    with _lock:
        if not core.is_initialized():
            return
        _state.cause = core.failure()
        try:
            if _state.cause is None:
                core.shutdown(reason)
        except Error:
            _state.cause = core.failure()
            raise
        finally:
            core.timeline_stop()
            if _state.cause is not None:
                core.drop()
            if not core.is_initialized():
                _state.settings = _state.communicator = None
                on_shutdown()


def is_initialized() -> bool:
    """Whether this process has an engine, working or failed. Local."""
    return core.is_initialized()


def settings() -> config.Settings:
    """The settings in use. Local."""
    if _state.settings is None or not core.is_initialized():
        core.rank()  # says why there is none
    assert _state.settings is not None
    return _state.settings


def current_settings() -> config.Settings | None:
    """The same object from an ``init`` to its ``shutdown``; None without an engine. Local."""
    return _state.settings


def rank() -> int:
    """This process's rank, from 0. Local. Raises NotInitialized before ``init()``."""
    return core.rank()


def size() -> int:
    """Number of ranks. Local. Raises NotInitialized before ``init()``."""
    return core.size()


def local_rank() -> int:
    """This process's rank among those of its node. Local."""
    return core.local_rank()


def local_size() -> int:
    """Number of ranks of this node. Local."""
    return core.local_size()


def cross_rank() -> int:
    """This node's number among the nodes that have a rank with this local_rank. Local."""
    return core.cross_rank()


def cross_size() -> int:
    """Number of nodes that have a rank with this local_rank. Local."""
    return core.cross_size()


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of ranks. Local."""
    return core.is_homogeneous()


def describe() -> str:
    """How the ranks talk: library, version and path, shared memory or not. Local."""
    return core.describe()


def join() -> int:
    """Waits until all ranks have joined; meanwhile reductions of the others get zeros from here.

    For ranks that run out of data at different steps. Collective over the world, without a time
    limit. Averages still divide by the number of all ranks. Only reductions are possible meanwhile:
    an allgather, a broadcast or a barrier is an InvalidArgument on the ranks that call it.
    KeyboardInterrupt gets through; the next call is then the rest of this one.

    Returns: the last rank to join.

    Raises: NotInitialized: before ``init()``; engine errors.
    """
    return core.join()


def plan(domain: str | None = None) -> str:
    """The groups of domains, a line each, with their entries, bytes, and times. Local.

    Times, predicted and measured by this rank, are of domains of optimizers and tapes, in
    milliseconds from the end of the batch before.

    Domains are declared by optimizers, tapes and the other operations of ``gradred.tensorflow``;
    calls on arrays declare none. Bytes that depend on a dimension not known yet are "?". domain:
    its name; None: all that were declared here, in their order.

    Raises:
        InvalidArgument: this domain was not declared here.
        NotInitialized: before ``init()``.
    """
    core.rank()  # says so when there is no engine
    if domain is not None:
        text = core.plan(domain)
        return text + "".join(plan_file.describe(p) for p in core.plans() if p["domain"] == domain)
    groups = "".join(core.plan(name) for name in core.registered())
    return groups + "".join(plan_file.describe(p) for p in core.plans())


def save_plan(path: str | os.PathLike[str]) -> None:
    """Writes the order, groups and times of the domains that optimizers and tapes have run. Local.

    For ``GRADRED_PLAN``, with which the next job begins where this one has come to, and for
    ``gradred plan``. Plans are equal on all ranks: call it on one, when they have settled; times
    are those of this rank.

    Raises:
        OSError: the file cannot be written.
        NotInitialized: before ``init()``.
    """
    plan_file.write(path, core.size(), core.plans())


def _refuse_in_child() -> None:
    if _state.forked_from:
        raise NotInitialized(
            f"init: this process was forked from {_state.forked_from}: a forked child has no "
            'engine and cannot make one; start it with the "spawn" or "forkserver" method'
        )


def _refuse_after_failure(cause: tuple[str, str] | None) -> None:
    if cause is not None:
        kind, text = cause
        raise getattr(errors, kind)(
            f"init: refused after an engine error; start a new process. The first cause was: {text}"
        )


def _ranks_of(comm: Any) -> dict[str, Any]:
    """The options of open_world that say which ranks take part."""
    nothing = {"mpi_comm": 0, "mpi_comm_size": 0, "ranks": []}
    if comm is None:
        return nothing
    if type(comm).__module__.split(".")[0] == "mpi4py":
        from mpi4py import MPI

        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise InvalidArgument(f"init: comm={comm!r}: expected an intracommunicator")
        return {**nothing, "mpi_comm": MPI._addressof(comm), "mpi_comm_size": MPI._sizeof(comm)}
    if isinstance(comm, Sequence) and not isinstance(comm, str):
        ranks = list(comm)
        if all(isinstance(r, int) and r >= 0 for r in ranks) and len(set(ranks)) == len(ranks):
            return {**nothing, "ranks": ranks}
    raise InvalidArgument(
        f"init: comm={comm!r}: expected None, a list of ranks, each once, or an mpi4py communicator"
    )


def _point_mpi4py_at_our_library() -> None:
    """A later import of mpi4py must not load another MPI than the one that is initialised."""
    library = core.mpi_library()
    if library is not None:
        os.environ.setdefault("MPI4PY_LIBMPI", library[0])


def _report_once(notes: Iterable[str]) -> None:
    """Says, on rank 0 and once a process, which of Horovod's variables mean nothing."""
    if core.rank() == 0:
        for note in notes:
            if note not in _state.reported:
                _state.reported.add(note)
                logger.warning(note)


def _prepare(values: config.Settings, environ: Mapping[str, str]) -> None:
    """Log lines, exit and exception hooks; once a process."""
    if logger.level == logging.NOTSET or "GRADRED_LOG_LEVEL" in environ:
        logger.setLevel(values.log_level.upper())
    if _state.prepared_pid == os.getpid():
        return
    _state.prepared_pid = os.getpid()
    for line in config.unknown_variables(os.environ):
        logger.warning(line)
    core.open_log()
    # See Note [Log lines] in native/bindings/log.cpp.
    _state.log_thread = threading.Thread(target=_pass_log_lines, name="gradred-log", daemon=True)
    _state.log_thread.start()
    uncaught.watch()
    atexit.register(_at_exit)


def _pass_log_lines() -> None:
    while lines := core.take_log_lines():
        for level, text in lines:
            logger.log(level, text)


def _at_exit() -> None:
    """Shuts down; after an engine error sees to it that MPI is not finalized."""
    if os.getpid() != _state.prepared_pid:
        return
    left = False
    how = f": {uncaught.text()}" if uncaught.text() else ""
    try:
        shutdown(f"the process ended{how}")
    except BaseException as error:
        logger.error("shutdown at exit: %s: %s", type(error).__name__, error)
        left = True
    core.close_log()
    if _state.log_thread is not None:
        _state.log_thread.join(1.0)
    if left or _state.cause is not None:
        # See Note [Leaving after an engine error] in native/bindings/leave.cpp.
        core.leave_at_exit(_state.mpi_of_others and "mpi4py.MPI" in sys.modules, 1)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may hold the old one
    if _state.settings is not None and not _state.forked_from:
        _state.forked_from = f"pid {os.getppid()}, which had called init()"
    _state.settings = _state.log_thread = None


os.register_at_fork(after_in_child=_after_fork_in_child)
