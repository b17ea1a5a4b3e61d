"""Starts the ranks itself, on this machine, without MPI."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

from gradred.launch.errors import UsageError

_MOST_RANKS = 4096  # on one machine: more would be a slip that takes the machine down


def check_size(size: int) -> None:
    """Raises UsageError for more ranks than one machine may get."""
    if size > _MOST_RANKS:
        raise UsageError(f"-np {size}: one machine gets at most {_MOST_RANKS} ranks")


def start(
    command: Sequence[str],
    size: int,
    environ: Mapping[str, str],
    preexec: Callable[[], None],
) -> list[int]:
    """Starts `size` ranks of `command`; returns their pids. Rank 0 alone has our standard input."""
    pids = []
    for rank in range(size):
        process = subprocess.Popen(
            command,
            env={**environ, "GRADRED_LOCAL_RANK": str(rank), "GRADRED_LOCAL_SIZE": str(size)},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            preexec_fn=preexec,
        )
        process.returncode = 0  # the caller waits for the pid, not this object
        pids.append(process.pid)
    return pids
