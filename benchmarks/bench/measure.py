"""Measuring inside a rank, and bringing the ranks' figures together in the parent."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.native import Region

__all__ = [
    "SETTLE_STEPS",
    "Block",
    "Figures",
    "engine_threads",
    "loop",
    "me",
    "slowest",
    "start",
    "summarize",
]

# After so many steps a plan of gradred that is measured (groups="auto") has been chosen.
SETTLE_STEPS = 130


@dataclass
class _Me:
    rank: int = 0
    size: int = 1
    region: Region | None = None
    engine_threads: set[int] = field(default_factory=set)

    def barrier(self) -> None:
        """Of the ranks, through memory, without the contestant's library."""
        assert self.region is not None
        self.region.barrier()


me = _Me()


def start(rank: int, size: int, region: Region) -> None:
    me.rank, me.size, me.region = rank, size, region


@contextmanager
def engine_threads() -> Iterator[None]:
    """The threads that are new after the body are the contestant's engine."""
    before = set(os.listdir("/proc/self/task"))
    yield
    me.engine_threads |= {int(t) for t in set(os.listdir("/proc/self/task")) - before}


def engine_cpu_s() -> float:
    """CPU seconds of the engine's threads so far."""
    total = 0
    for thread in me.engine_threads:
        try:
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                total += int(file.read().split()[0])
        except OSError:
            continue
    return total * 1e-9


@dataclass
class Block:
    """One rank's part of one block of iterations."""

    times_s: list[float]
    wrong: int  # elements that differ from the expected, over the checks of the block
    checked: int
    cpu_s: float  # of the whole process, inside the timed parts
    engine_cpu_s: float  # of the engine's threads, in the whole block
    faults: int  # minor page faults, inside the timed parts
    extra: dict[str, float] = field(default_factory=dict)  # sums over the timed iterations


def loop(
    run: Callable[[], Any],
    iterations: int,
    warmup: int = 1,
    prepare: Callable[[], Any] | None = None,
    check: Callable[[], tuple[int, int]] | None = None,
    counters: Callable[[], dict[str, float]] | None = None,
    together: bool = True,
) -> dict[str, Any]:
    """A block: ``prepare`` (not timed), a barrier, ``run`` (timed), again and again.

    check: after the last iteration: wrong elements and how many were looked at. counters: sums that
    grow; their growth over the timed iterations is ``extra``. together: with barriers.
    """
    times, cpu, faults = [], 0.0, 0
    engine = 0.0
    before: dict[str, float] = {}
    for i in range(-warmup, iterations):
        if prepare is not None:
            prepare()
        if i == 0:
            engine = engine_cpu_s()
            before = counters() if counters is not None else {}
        faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if together:
            me.barrier()
        cpu_before = time.process_time()
        begun = time.perf_counter()
        run()
        ended = time.perf_counter()
        if i >= 0:
            times.append(ended - begun)
            cpu += time.process_time() - cpu_before
            faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before
    engine = engine_cpu_s() - engine
    after = counters() if counters is not None else {}
    extra = {name: after[name] - before[name] for name in after}
    wrong, checked = check() if check is not None else (0, 0)
    return asdict(Block(times, wrong, checked, cpu, engine, faults, extra))


@dataclass
class Figures:
    """Of all blocks of one contestant. Times are those of the slowest rank."""

    iterations: int
    median_s: float
    p99_s: float
    min_s: float
    wrong: int
    checked: int
    faults: float  # a step and rank
    cpu_s: float  # a step and rank
    engine_cpu_s: float  # a step and rank
    medians_s: list[float]  # of each block
    extra: dict[str, float]  # a step and rank


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below ``share`` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def slowest(block: Sequence[dict[str, Any]]) -> list[float]:
    """Each iteration's time on the slowest rank."""
    return [max(times) for times in zip(*(rank["times_s"] for rank in block), strict=True)]


def summarize(blocks: Sequence[Sequence[dict[str, Any]]]) -> Figures:
    """blocks: of one contestant: for each block the ranks' results of ``loop``."""
    times = [slowest(block) for block in blocks]
    every = [t for block in times for t in block]
    ranks = [rank for block in blocks for rank in block]
    steps = sum(len(rank["times_s"]) for rank in ranks)

    def a_step(key: str) -> float:
        return sum(rank[key] for rank in ranks) / steps

    names = {name for rank in ranks for name in rank["extra"]}
    return Figures(
        iterations=len(every),
        median_s=statistics.median(every),
        p99_s=percentile(every, 0.99),
        min_s=min(every),
        wrong=sum(rank["wrong"] for rank in ranks),
        checked=sum(rank["checked"] for rank in ranks),
        faults=a_step("faults"),
        cpu_s=a_step("cpu_s"),
        engine_cpu_s=a_step("engine_cpu_s"),
        medians_s=[statistics.median(block) for block in times],
        extra={n: sum(rank["extra"].get(n, 0.0) for rank in ranks) / steps for n in sorted(names)},
    )
