"""Starts the ranks itself, on this machine, without MPI."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence


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
