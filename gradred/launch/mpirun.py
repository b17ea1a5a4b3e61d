"""Finds mpirun, tells its family and composes its line."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gradred.launch.errors import UsageError
from gradred.launch.hosts import Host

# The environment of the job that other machines get; on this one the ranks inherit it anyway.
_EXPORTED = re.compile(
    r"(GRADRED|HOROVOD|NCCL|CUDA|TF|OMP|KERAS)_.*|PATH|PYTHONPATH|LD_LIBRARY_PATH"
)
# What a rank has from its launcher and a new job must not see.
_OF_A_RANK = re.compile(
    r"(PMIX|PMI|HYDI|JSM_NAMESPACE|GRADRED_LOCAL|GRADRED_JOB|PRTE_LAUNCHED|OPAL_USER_PARAMS|OMPI_WORLD)(_.*)?"
    r"|MPI_LOCAL(RANKID|NRANKS)|OMPI_(COMM_WORLD|UNIVERSE|NUM_APP|FILE|COMMAND|ARGV|FIRST|APP)(_.*)?"
    r"|OMPI_MCA_(num_procs|initial_wdir|cpu_type|orte_.*|ess_.*)"
)


@dataclass(frozen=True)
class Mpirun:
    """A launcher; family is "Open MPI", "Spectrum MPI", "MPICH" or "Intel MPI"."""

    path: str
    family: str
    version: str

    @property
    def hydra(self) -> bool:
        return self.family in ("MPICH", "Intel MPI")


def find_mpirun() -> str | None:
    """The mpirun of the running Python's environment, else of PATH."""
    return shutil.which("mpirun", path=os.path.join(sys.prefix, "bin")) or shutil.which("mpirun")


def family_of(version_text: str) -> tuple[str, str]:
    """Family and version from what `mpirun --version` prints. UsageError for another."""
    for family, pattern in (
        ("Spectrum MPI", r"Spectrum MPI\)?\D*([\d.]+\w*)"),
        ("Open MPI", r"\(Open(?: MPI|RTE)\) ([\d.]+\w*)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version ([\d.]+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
    ):
        match = re.search(pattern, version_text, re.DOTALL)
        if match:
            return family, match[1]
    raise UsageError(f"mpirun is of no known family; it says {version_text.strip()[:80]!r}")


@functools.cache
def identify(path: str) -> Mpirun:
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} --version: {error}") from None
    return Mpirun(path, *family_of(done.stdout + done.stderr))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher gives a rank, so that a rank can start a job of its own."""
    if not {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "GRADRED_LOCAL_RANK"} & set(environ):
        return dict(environ)
    return {name: value for name, value in environ.items() if not _OF_A_RANK.fullmatch(name)}


def root_variables(mpirun: Mpirun, user: int) -> dict[str, str]:
    """What Open MPI wants to see before it runs as root, as in a container."""
    if mpirun.hydra or user != 0:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def compose(
    mpirun: Mpirun,
    size: int,
    hosts: Sequence[Host],
    environ: Mapping[str, str],
    exported: Collection[str],
    command: Sequence[str],
) -> list[str]:
    """The line that starts `command` on `size` ranks.

    Binding is the supervisor's: the same for all families, and right when ranks outnumber cores.
    `exported` are the names that the user asked to hand on to other machines.
    """
    line = [mpirun.path, "-n", str(size)]
    remote = any(not host.is_this_machine for host in hosts)
    names = sorted({*exported, *(n for n in environ if remote and _EXPORTED.fullmatch(n))})
    host_list = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if mpirun.hydra:
        if hosts:
            line += ["-hosts", host_list]
        if remote:
            line += ["-genvlist", ",".join(names)]
    else:
        # Open MPI counts slots by cores; how many ranks are right is for the user to say.
        line += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
        if hosts:
            line += ["--host", host_list]
        for name in names:
            line += ["-x", name]
    return [*line, *command]
