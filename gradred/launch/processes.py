"""The processes of a job on this machine, and the files that MPI leaves when they are killed."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHARED_FOLDER = "/dev/shm/"
# What MPI libraries name their shared memory. A program may want to keep other files there.
_MPI_FILES = ("mpich_shm_", "sm_segment.", "vader_segment.", "osc_rdma.", "Intel_MPI_")


def become_subreaper() -> None:
    """Processes whose parent ends become children of this one, so that none is lost."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int) -> None:
    """This process gets the signal when its parent ends: a killed launcher leaves no job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _parents() -> dict[int, int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command, in parentheses, may contain anything.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(name)] = int(parent)
    return parents


def descendants(ancestor: int) -> list[int]:
    """Living children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    frontier = children.get(ancestor, [])
    while frontier:
        found += frontier
        frontier = [child for pid in frontier for child in children.get(pid, [])]
    return found


def send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def reap() -> list[tuple[int, int]]:
    """(pid, exit code) of each child that has ended; negative for a signal."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def end_all(ancestor: int, grace_s: float) -> None:
    """Ends all descendants: SIGTERM, and SIGKILL to those that are there after the grace time."""
    end = time.monotonic() + grace_s
    send(signal.SIGTERM, descendants(ancestor))
    while descendants(ancestor) and time.monotonic() < end:
        reap()
        time.sleep(0.02)
    while left := descendants(ancestor):
        send(signal.SIGKILL, left)
        reap()
        time.sleep(0.02)
    reap()


def shared_files(pids: Iterable[int]) -> set[str]:
    """Files of MPI libraries in /dev/shm that the processes have mapped."""
    found = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                for line in file:
                    path = line[line.find("/") :].rstrip()
                    if path.startswith(tuple(_SHARED_FOLDER + name for name in _MPI_FILES)):
                        found.add(path)
        except OSError:
            continue
    return {path for path in found if not path.endswith(" (deleted)")}


def remove_files(paths: Iterable[str]) -> None:
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            pass
