"""Process sets: groups of ranks that reduce among themselves."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

from gradred._native import core
from gradred.errors import Error, InvalidArgument

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "member_of",
    "remove_process_set",
]


class ProcessSet:
    """A set of ranks. Usable once it was passed to ``init`` or ``add_process_set``.

    ranks_or_comm: ranks in the world, in any order, each once; or an mpi4py communicator, whose
    ranks are known once the set is registered. The parts of a split communicator are sets of their
    own: each process holds the one that it is in.

    Raises InvalidArgument for ranks that can be no set.
    """

    process_set_id: int | None
    ranks: list[int]
    mpi_comm: Any

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id = None
        self.mpi_comm = None
        self._parts = [self]  # of a communicator's split, in the order of their ids
        self._removed = False
        if type(ranks_or_comm).__module__.partition(".")[0] == "mpi4py":
            self.mpi_comm = _intracommunicator(ranks_or_comm)
            self.ranks = []
            return
        try:
            self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise InvalidArgument(
                f"ProcessSet: expected ranks or an mpi4py communicator, got {ranks_or_comm!r}"
            ) from None
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or self.ranks[0] < 0:
            raise InvalidArgument(
                f"ProcessSet: expected ranks from 0, each once and at least one, got {self.ranks}"
            )

    def size(self) -> int:
        """Number of ranks in the set. Local."""
        self.require_id("size")
        return len(self.ranks)

    def rank(self) -> int:
        """This process's rank in the set. Local. Raises InvalidArgument if it is no member."""
        self.require_member("rank")
        return self.ranks.index(core.rank())

    def included(self) -> bool:
        """Whether this process is a member. Local."""
        self.require_id("included")
        return core.rank() in self.ranks

    def require_id(self, what: str) -> int:
        """The set's id. Raises NotInitialized or InvalidArgument naming ``what`` if it has none."""
        core.rank()  # NotInitialized when there is no engine
        if self.process_set_id is None:
            why = "has been removed" if self._removed else "is not registered"
            raise InvalidArgument(
                f"{what}: process set {self._name()} {why}: pass it to init() or "
                "add_process_set() on every rank"
            )
        return self.process_set_id

    def require_member(self, what: str) -> int:
        """The set's id. Raises InvalidArgument naming rank and set if this rank is no member."""
        number = self.require_id(what)
        if core.rank() not in self.ranks:
            raise InvalidArgument(
                f"{what}: rank {core.rank()} is no member of process set {number} (ranks "
                f"{', '.join(map(str, self.ranks))})"
            )
        return number

    def _name(self) -> str:
        return str(self.ranks) if self.ranks or self.mpi_comm is None else repr(self.mpi_comm)

    def _forget(self, *, removed: bool) -> None:
        self.process_set_id = None
        self._removed = removed
        if self.mpi_comm is not None:
            self._parts = [self]
            self.ranks = []

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._name()})"


class _GlobalProcessSet(ProcessSet):
    """All ranks; known from ``init()`` on."""

    def __init__(self) -> None:
        self.ranks = []
        self.process_set_id = 0
        self.mpi_comm = None

    def require_id(self, what: str) -> int:
        core.rank()
        return 0

    def require_member(self, what: str) -> int:
        return self.require_id(what)


global_process_set: ProcessSet = _GlobalProcessSet()

_registered: list[ProcessSet] = []
_comm_of_init: Any = None  # what init() was given: how the world's ranks are numbered


def member_of(process_set: Any, what: str) -> int:
    """The id of the set that a call names, whose member this rank has to be.

    Raises InvalidArgument, naming the call ``what``, or NotInitialized.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgument(f"{what}: process_set={process_set!r}: expected a ProcessSet")
    return process_set.require_member(what)


def add_process_set(process_set: Any) -> ProcessSet:
    """Registers a process set. Collective over all ranks, members and others, in one order.

    process_set: a ProcessSet, or ranks or an mpi4py communicator to make one of. A ProcessSet that
    is registered is returned as it is. There may be 4094 at a time.

    Raises:
        InvalidArgument: ranks outside of the world; another set has these ranks (one of all ranks
            beside the global one is fine); a rank has joined.
        Mismatch: ranks differ over the processes.
        Unsupported: there are too many.
        NotInitialized: before ``init()``.
    """
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    core.rank()
    if new.process_set_id is not None:
        return new
    if new.mpi_comm is None:
        _check(new.ranks)
        _register(new)
    else:
        _register_communicator(new)
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. Collective over all ranks, members and others, in one order.

    Calls that all members have made still run; others of the set that are under way fail with
    Abandoned, later ones with InvalidArgument. The object may be registered again.

    Returns: False, without waiting, for the global set and for one that is not registered.

    Raises:
        Mismatch: the ranks remove different sets.
        InvalidArgument: not a ProcessSet; a rank has joined.
        NotInitialized: before ``init()``.
    """
    core.rank()
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgument(f"remove_process_set: expected a ProcessSet, got {process_set!r}")
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    _unregister(process_set._parts, removed=True)
    return True


def _check(ranks: list[int]) -> None:
    """Raises InvalidArgument for ranks that no further set can have. Local, alike on all ranks."""
    size = core.size()
    if ranks[-1] >= size:
        raise InvalidArgument(
            f"add_process_set: rank {ranks[-1]} is outside of the world of {size} ranks"
        )
    same = [s for s in _registered if s.ranks == ranks and len(s.ranks) < size]
    if same:
        raise InvalidArgument(
            f"add_process_set: process set {same[0].process_set_id} has the ranks {ranks} "
            "already: use that one"
        )


def _register(new: ProcessSet) -> None:
    """Gives a set with ranks that were checked its id. Collective."""
    new.process_set_id = core.add_process_set(new.ranks)
    new._removed = False
    _registered.append(new)


def _unregister(parts: list[ProcessSet], *, removed: bool) -> None:
    """Removes sets that are registered. Collective."""
    for part in list(parts):
        assert part.process_set_id is not None
        core.remove_process_set(part.process_set_id)
        _registered.remove(part)
        part._forget(removed=removed)


def _register_communicator(new: ProcessSet) -> None:
    """Registers all sets that the processes' communicators are. Collective."""
    from gradred.objects import allgather_object

    mine, problem = [], ""
    try:
        mine = _ranks_of(new.mpi_comm)
    except InvalidArgument as error:
        problem = str(error)
    everyone = allgather_object((mine, problem), "gradred.process_set")
    for _, text in everyone:
        if text:
            raise InvalidArgument(text)
    parts = [ProcessSet(ranks) for ranks in sorted({tuple(r) for r, _ in everyone if r})]
    without = [rank for rank, (ranks, _) in enumerate(everyone) if not ranks]
    if without and len(parts) != 1:
        raise InvalidArgument(
            f"add_process_set: rank {', '.join(map(str, without))} is in none of the communicators "
            f"of {[part.ranks for part in parts]}, and cannot tell which one is meant"
        )
    for part in parts:  # before any of them is registered
        _check(part.ranks)
    mine = mine or parts[0].ranks  # of a communicator that this rank is not in
    for i, part in enumerate(parts):
        if part.ranks == mine:
            parts[i] = new
            new.ranks = mine
    for i, part in enumerate(parts):
        part._parts = parts
        try:
            _register(part)
        except Error:  # the same on all ranks, which undo it alike
            part._forget(removed=False)
            with suppress(Error):
                _unregister(parts[:i], removed=False)
            raise


def _intracommunicator(comm: Any) -> Any:
    from mpi4py import MPI

    if isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        return comm
    raise InvalidArgument(f"ProcessSet: expected an intracommunicator, got {comm!r}")


def _ranks_of(comm: Any) -> list[int]:
    """The world's ranks in an mpi4py communicator, ascending; [] in none. Local."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Get_group()
    if isinstance(_comm_of_init, MPI.Comm):
        world = _comm_of_init.Get_group()
    elif _comm_of_init is not None:
        world = world.Incl(list(_comm_of_init))
    if world.size != core.size():
        raise InvalidArgument(
            f"add_process_set: MPI has {world.size} of the world's {core.size()} ranks: a "
            "communicator says nothing of the others; use a list of ranks"
        )
    if comm == MPI.COMM_NULL:
        return []
    group = comm.Get_group()
    ranks = MPI.Group.Translate_ranks(group, list(range(group.size)), world)
    if MPI.UNDEFINED in ranks:
        raise InvalidArgument(
            f"add_process_set: {comm!r} has ranks that are not in the world of {core.size()} ranks"
        )
    return sorted(ranks)


def check_sets(process_sets: Any) -> list[ProcessSet]:
    """What ``init`` got as its sets, as a list; refuses what is none. Local."""
    if isinstance(process_sets, str):
        if process_sets.lower() == "dynamic":  # sets can always be added and removed
            return []
        raise InvalidArgument(
            f"init: process_sets={process_sets!r}: expected a list of ProcessSet, or 'dynamic'"
        )
    given = list(process_sets)
    for process_set in given:
        if not isinstance(process_set, ProcessSet):
            raise InvalidArgument(f"init: process_sets: expected ProcessSet, got {process_set!r}")
        if sum(other is process_set for other in given) > 1:
            raise InvalidArgument(f"init: process_sets: {process_set!r} is named twice")
    return given


def on_init(process_sets: list[ProcessSet], comm: Any) -> None:
    """Fills in the global set and registers the others. Collective; for ``init``."""
    global _comm_of_init
    _comm_of_init = comm
    global_process_set.ranks = list(range(core.size()))
    for process_set in process_sets:
        add_process_set(process_set)


def on_shutdown() -> None:
    """Forgets all ids: a set can be registered again after the next ``init``."""
    global_process_set.ranks = []
    for process_set in _registered:
        process_set._forget(removed=False)
    _registered.clear()
