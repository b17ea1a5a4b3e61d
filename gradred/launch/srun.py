"""Composes the line of Slurm's srun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradred.launch import mpirun
from gradred.launch.errors import UsageError

if TYPE_CHECKING:
    from gradred.launch.launchers import Job

_HOSTFILE = "srun.hosts"


def mpi_type(words: Sequence[str], path: str | None) -> str:
    """What --mpi is to be: by the family of the mpirun that is there; "" where `words` say it."""
    if any(word == "--mpi" or word.startswith("--mpi=") for word in words):
        return ""
    if path is None:
        return "pmix"
    try:
        return "pmi2" if mpirun.identify(path).hydra else "pmix"
    except UsageError:
        return "pmix"


def compose(path: str, mpi: str, job: Job) -> tuple[list[str], dict[str, str]]:
    """The line that starts the job, and its further environment.

    Slurm binds each rank to cores of its own and hands the environment on. Hosts with equally many
    ranks are said by their number, others by a file with a host for each rank.
    """
    line = [path, f"--ntasks={job.size}"]
    more: dict[str, str] = {}
    if mpi:
        line.append(f"--mpi={mpi}")
    if job.hosts:
        taken = _taken(job)
        names = ",".join(name for name, _ in taken)
        counts = {count for _, count in taken}
        line += [f"--nodes={len(taken)}", f"--nodelist={names}"]
        if len(counts) == 1:
            line.append(f"--ntasks-per-node={counts.pop()}")
        else:
            more["SLURM_HOSTFILE"] = os.path.join(job.folder, _HOSTFILE)
            with open(more["SLURM_HOSTFILE"], "w") as file:
                file.writelines(f"{name}\n" * count for name, count in taken)
            line.append("--distribution=arbitrary")
    if job.cores is not None:
        line.append(f"--cpus-per-task={job.cores}")
    line.append("--cpu-bind=cores")
    if job.gpus:
        line += [f"--gpus-per-task={job.gpus}", f"--gpu-bind=per_task:{job.gpus}"]
    # The supervisors have given the other ranks their time when one of them ends badly.
    line += ["--kill-on-bad-exit=1", "--export=ALL"]
    return [*line, *job.words, *job.command], more


def _taken(job: Job) -> list[tuple[str, int]]:
    """How many ranks each host gets: the first ones are filled up."""
    left, taken = job.size, []
    for host in job.hosts:
        if left > 0:
            taken.append((host.name, min(left, host.slots)))
            left -= taken[-1][1]
    return taken
