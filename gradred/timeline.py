"""Recording what each rank does, for Perfetto and chrome://tracing. See docs/timeline.md."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gradred._native import core
from gradred.collectives import allgather
from gradred.errors import InvalidArgument
from gradred.objects import allgather_object

__all__ = ["start_timeline", "stop_timeline"]

logger = logging.getLogger("gradred")

_PROBES = 20  # exchanges of clocks, where ranks have more than one


def start_timeline(
    file_path: str | os.PathLike[str], mark_cycles: bool = False, *, chunks: bool = False
) -> None:
    """Begins to record, each rank to a file of its own. Collective over the world.

    file_path: rank N writes ``<file_path without .json>.rank<N>.json``; a file that is there is
    replaced, its folder must exist. mark_cycles: a line across a rank's threads at the end of each
    round of negotiation (Horovod's cycles). chunks: each chunk's packing, summing and unpacking,
    not only their sums over a group: hundreds of events a step. All are equal on all ranks.
    Call it where no other thread reduces, as between two steps. ``GRADRED_TIMELINE`` does the same
    in ``init()``, but for a rank whose file cannot be written only warns.

    Raises:
        InvalidArgument: a timeline is being recorded already, arguments differ between ranks, or a
            rank cannot write its file. The same on all ranks; none records then.
        NotInitialized: before ``init()``. Engine errors.
    """
    problems = _start(os.fspath(file_path), bool(mark_cycles), bool(chunks), every_rank=True)
    if problems:
        raise InvalidArgument("start_timeline: " + "; ".join(problems))


def stop_timeline() -> None:
    """Writes the rest and closes this rank's file. Does nothing where none is recorded. Local."""
    core.timeline_stop()


def start_at_init(path: str, mark_cycles: bool) -> None:
    """Begins to record for GRADRED_TIMELINE. Collective. Never fails for want of a file."""
    for problem in _start(path, mark_cycles, False, every_rank=False):
        logger.warning("GRADRED_TIMELINE: %s; the other ranks record", problem)


def file_of_rank(path: str, rank: int) -> str:
    """The file that a rank writes."""
    return f"{path.removesuffix('.json')}.rank{rank}.json"


def _start(path: str, mark_cycles: bool, chunks: bool, *, every_rank: bool) -> list[str]:
    """Begins to record. Returns why not: all ranks' reasons (every_rank: all or none), or mine."""
    rank = core.rank()
    file = file_of_rank(path, rank)
    mine = {
        "path": path,
        "mark_cycles": mark_cycles,
        "chunks": chunks,
        "clock": _clock_id(),
        "problem": _problem(rank, path, file),
    }
    ranks = allgather_object(mine, "gradred.timeline")
    problems = [r["problem"] for r in ranks if r["problem"]]
    for key in ("path", "mark_cycles", "chunks"):
        others = [r for r, values in enumerate(ranks) if values[key] != ranks[0][key]]
        if others:
            r = others[0]
            problems.append(
                f"{key} is {ranks[0][key]!r} on rank 0 and {ranks[r][key]!r} on rank {r}"
            )
    if every_rank and problems:
        return problems
    origin, offset, uncertainty = _clock_of_rank_0([r["clock"] for r in ranks])
    if mine["problem"]:
        return [str(mine["problem"])]
    host = socket.gethostname()
    core.timeline_start(
        file, rank, core.size(), host, origin, offset, uncertainty, mark_cycles, chunks
    )
    return []


def _problem(rank: int, path: str, file: str) -> str:
    """Why this rank cannot record, or ""."""
    if recorded := core.timeline_path():
        return f"rank {rank} records to '{recorded}' already; call stop_timeline() first"
    if not Path(path).name or Path(path).is_dir():
        return f"{path!r} is a folder: expected the name of a file"
    try:
        with open(file, "ab"):
            return ""
    except OSError as error:
        return f"rank {rank} on {socket.gethostname()} cannot write '{file}': {error.strerror}"


def _clock_id() -> str:
    """Equal where the monotonic clock is: the boot of a machine, and a namespace of time."""
    sources: tuple[Callable[[], str], ...] = (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/time"),
    )
    parts = []
    for read in sources:
        try:
            parts.append(read())
        except OSError:
            parts.append(socket.gethostname())
    return " ".join(parts)


def _clock_of_rank_0(clocks: list[str]) -> tuple[int, int, int]:
    """Collective: when rank 0 began (of its clock), its clock minus mine, and the error; all in ns.

    No rank leaves an exchange before each has entered it. So what one reads when it enters is
    before what another reads when it leaves, which bounds the distance of their clocks from both
    sides; the narrowest of several exchanges count.
    """
    probes = 1 if len(set(clocks)) == 1 else _PROBES
    entered, left = [], []
    for _ in range(probes):
        entered.append(core.timeline_now())
        allgather(np.array([0], np.int64), "gradred.timeline.clock")
        left.append(core.timeline_now())
    mine = np.array([[entered, left]], np.int64)
    everyone = allgather(mine, "gradred.timeline.clocks")
    return distance(everyone, clocks, min(core.rank(), len(everyone) - 1))


def distance(stamps: Any, clocks: list[str], rank: int) -> tuple[int, int, int]:
    """(rank 0's first stamp, its clock minus this rank's, error), ns.

    stamps: int64 [ranks, 2, exchanges], when a rank entered and left; clocks: of ranks, equal where
    they share one.
    """
    (entered_0, left_0), (entered, left) = stamps[0], stamps[rank]
    origin = int(entered_0[0])
    if clocks[rank] == clocks[0]:
        return origin, 0, 0
    low, high = int((entered_0 - left).max()), int((left_0 - entered).min())
    return origin, (low + high) // 2, (high - low + 1) // 2
