"""Starting the programs that train, in the jobs of several libraries."""

from __future__ import annotations

from collections.abc import Mapping

import contestants
from bench.job import JobError, Jobs
from bench.report import Report

__all__ = ["Peers", "start"]

Peers = Mapping[str, tuple[str, Mapping[str, str]]]  # name -> (library of programs.py, settings)


def start(jobs: Jobs, peers: Peers, ranks: int, report: Report) -> list[str]:
    """Starts a job for each peer; returns the names of those that are there."""
    names = []
    for name, (library, env) in peers.items():
        if library == "horovod" and not contestants.available("horovod"):
            report.note(f"{name}: not installed here (make peers)")
            continue
        jobs.start(name, ranks, env, "local" if library == "none" else "auto")
        try:
            with jobs.turn(name) as job:
                job.call("programs.begin", library=library)
        except JobError as error:
            report.note(f"{name}: does not start: {error}")
            jobs.end(name)
            continue
        names.append(name)
    return names
