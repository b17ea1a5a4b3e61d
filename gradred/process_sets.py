"""Process sets: groups of ranks that reduce among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradred._native import core
from gradred.errors import InvalidArgument

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "member_of"]


class ProcessSet:
    """A set of ranks. Usable once it was passed to ``init`` or ``add_process_set``.

    ranks: ranks in the world, in any order, each once.
    """

    process_set_id: int | None
    ranks: list[int]

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(int(rank) for rank in ranks)
        self.process_set_id = None
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
            raise InvalidArgument(
                f"{what}: process set {self.ranks} is not registered: pass it to init() or "
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

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks; known from ``init()`` on."""

    def __init__(self) -> None:
        self.ranks = []
        self.process_set_id = 0

    def require_id(self, what: str) -> int:
        core.rank()
        return 0

    def require_member(self, what: str) -> int:
        return self.require_id(what)


global_process_set: ProcessSet = _GlobalProcessSet()

_registered: list[ProcessSet] = []


def member_of(process_set: Any, what: str) -> int:
    """The id of the set that a call names, whose member this rank has to be.

    Raises InvalidArgument, naming the call ``what``, or NotInitialized.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgument(f"{what}: process_set={process_set!r}: expected a ProcessSet")
    return process_set.require_member(what)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set. Collective over all ranks, members and others, in one order.

    process_set: a ProcessSet, or the ranks of one. A ProcessSet that is registered is returned as
    it is. Ranks, also those of a set that exists, make a new set; there are at most 4094.

    Raises:
        InvalidArgument: ranks outside of the world.
        Mismatch: ranks differ over the processes.
        Unsupported: there are too many.
        NotInitialized: before ``init()``.
    """
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    size = core.size()
    if new.process_set_id is not None:
        return new
    if new.ranks[-1] >= size:
        raise InvalidArgument(
            f"add_process_set: rank {new.ranks[-1]} is outside of the world of {size} ranks"
        )
    new.process_set_id = core.add_process_set(new.ranks)
    _registered.append(new)
    return new


def on_init(process_sets: Iterable[ProcessSet]) -> None:
    """Fills in the global set and registers the others. Collective; for ``init``."""
    global_process_set.ranks = list(range(core.size()))
    for process_set in process_sets:
        if not isinstance(process_set, ProcessSet):
            raise InvalidArgument(f"init: process_sets: expected ProcessSet, got {process_set!r}")
        add_process_set(process_set)


def on_shutdown() -> None:
    """Forgets all ids: a set can be registered again after the next ``init``."""
    global_process_set.ranks = []
    for process_set in _registered:
        process_set.process_set_id = None
    _registered.clear()
