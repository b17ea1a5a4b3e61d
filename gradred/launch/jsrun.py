"""Composes the line of jsrun, the launcher of LSF with Spectrum MPI.

A *resource set* is what jsrun gives to a rank: cores and GPUs of one host. Where all hosts take
equally many ranks, their number and size is said; else, or on request, an explicit file has a line
for each rank, with its host, its logical CPUs and its GPUs by local rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradred.launch.errors import UsageError
from gradred.launch.supervisor import physical_cores

if TYPE_CHECKING:
    from gradred.launch.launchers import Job

_RANK_FILE = "jsrun.ranks"


@dataclass(frozen=True)
class LsfHost:
    """A host of the LSF job; cores: 0 where LSF does not say."""

    name: str
    cores: int


@dataclass(frozen=True)
class Place:
    """Ranks of one host."""

    host: str
    ranks: int
    cores: int  # of each rank


def lsf_hosts(environ: Mapping[str, str]) -> list[LsfHost]:
    """The compute hosts of the LSF job, without the one from which it is launched; [] outside."""
    slots: dict[str, int] = {}
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if words:
        for name, count in zip(words[::2], words[1::2], strict=False):
            if not count.isdecimal():
                raise UsageError(f"LSB_MCPU_HOSTS: {count!r} behind {name} is no number of slots")
            slots[name] = slots.get(name, 0) + int(count)
    else:
        names = environ.get("LSB_HOSTS", "").split()
        if not names and (file := environ.get("LSB_DJOB_HOSTFILE")):
            try:
                with open(file) as lines:
                    names = lines.read().split()
            except OSError as error:
                raise UsageError(f"LSB_DJOB_HOSTFILE={file}: {error.strerror}") from None
        for name in names:
            slots[name] = slots.get(name, 0) + 1
    first = next(iter(slots), None)
    if first is not None and len(slots) > 1 and slots[first] == 1 < max(slots.values()):
        del slots[first]
    return [LsfHost(name, cores) for name, cores in slots.items()]


def places(job: Job) -> list[Place]:
    """Which host takes how many ranks, with how many cores each.

    -H says how many a host takes; without it they are spread evenly over the hosts of the LSF job.
    """
    known = {host.name: host.cores for host in lsf_hosts(job.environ)}
    if job.hosts:
        slots = [(host.name, host.slots) for host in job.hosts]
        unknown = [name for name, _ in slots if known and name not in known]
        if unknown:
            raise UsageError(f"the LSF job has no host {unknown[0]}; it has {', '.join(known)}")
    else:
        if not known:
            raise UsageError(
                "--launcher jsrun: no LSF job here (LSB_MCPU_HOSTS, LSB_HOSTS and "
                "LSB_DJOB_HOSTFILE are not set): name the hosts with -H HOST:RANKS,..."
            )
        each, more = divmod(job.size, len(known))
        slots = [(name, each + (i < more)) for i, name in enumerate(known)]
    left, found = job.size, []
    for name, count in slots:
        ranks = min(left, count)
        if ranks == 0:
            break
        left -= ranks
        found.append(Place(name, ranks, _cores(job, name, known.get(name, 0), ranks)))
    return found


def _cores(job: Job, host: str, cores: int, ranks: int) -> int:
    each = cores // ranks if job.cores is None else job.cores
    if each == 0:
        if cores:
            raise UsageError(f"host {host} has {cores} cores for {ranks} ranks")
        raise UsageError(f"--launcher jsrun: the cores of host {host} are not known: --cores N")
    if cores and each * ranks > cores:
        raise UsageError(f"--cores {each}: host {host} has {cores} cores for {ranks} ranks")
    return each


def threads_of_a_core() -> int:
    """Hardware threads of a core here; the hosts of a job are of one kind."""
    cores = physical_cores(os.sched_getaffinity(0))
    return max(len(core) for core in cores)


def rank_file(job: Job, found: list[Place], threads: int) -> str:
    """The text of an explicit file: a line for each rank."""
    lines = ["overlapping_rs: allow", "cpu_index_using: logical"]
    rank = 0
    for place in found:
        for local_rank in range(place.ranks):
            each = place.cores * threads
            parts = [f"hostname: {place.host}", f"cpu: {_range(local_rank * each, each)}"]
            if job.gpus:
                parts.append(f"gpu: {_range(local_rank * job.gpus, job.gpus)}")
            lines.append(f"rank: {rank}: {{ {' ; '.join([*parts, 'mem: *'])} }}")
            rank += 1
    return "\n".join(lines) + "\n"


def _range(first: int, count: int) -> str:
    return f"{{{first}}}" if count == 1 else f"{{{first}-{first + count - 1}}}"


def compose(path: str, job: Job) -> list[str]:
    """The line that starts the job; writes the file of ranks where there is one."""
    found = places(job)
    alike = len({(place.ranks, place.cores) for place in found}) == 1
    if job.resources == "sets" and alike and not job.hosts:
        line = [
            *(path, "--nrs", str(job.size), "--tasks_per_rs", "1"),
            *("--cpu_per_rs", str(found[0].cores), "--gpu_per_rs", str(job.gpus)),
            *("--rs_per_host", str(found[0].ranks), "--launch_distribution", "packed"),
            *("--bind", "rs"),
        ]
    else:
        file = os.path.join(job.folder, _RANK_FILE)
        with open(file, "w") as out:
            out.write(rank_file(job, found, threads_of_a_core()))
        line = [path, "--erf_input", file]
    return [*line, *job.words, *job.command]
