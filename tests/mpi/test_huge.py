"""H17: more elements than fit in 31 bits, in all collectives.

The allreduce runs in place where 7 GB are free. The others need up to 13 GB and run where
GRADRED_TEST_HUGE is set:

    GRADRED_TEST_HUGE=1 gradred run -np 2 python -m pytest tests/mpi/test_huge.py
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(2, deadline=240)

COUNT = 2**31 + 5
PLACES = [0, 1, 2**16, 2**30, 2**31 - 1, 2**31, COUNT - 1]  # around where counts would wrap

huge = pytest.mark.skipif("GRADRED_TEST_HUGE" not in os.environ, reason="needs 13 GB")


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


def needs(job, gigabytes: float) -> None:
    """Skips on all ranks where not so much memory is free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if min(job.exchange(available_kib)) < gigabytes * 1e6:
        pytest.skip(f"less than {gigabytes} GB of memory are free")


def marked(rank: int, count: int = COUNT) -> np.ndarray:
    """Zeros, but for other small numbers at each of PLACES."""
    x = np.zeros(count, np.int8)
    for i, place in enumerate(p for p in PLACES if p < count):
        x[place] = i + 1 + 10 * rank
    return x


def check(result: np.ndarray, expected: dict[int, int]) -> None:
    """Non-zero exactly where expected, with these values."""
    assert np.count_nonzero(result) == len(expected)
    assert {place: int(result[place]) for place in expected} == expected


def test_allreduce(job) -> None:
    needs(job, 7)
    x = marked(job.rank)
    assert gr.allreduce(x, gr.Sum, name="huge", out=x) is x
    check(x, {place: 2 * (i + 1) + 10 for i, place in enumerate(PLACES)})


@huge
def test_broadcast(job) -> None:
    needs(job, 13)
    result = gr.broadcast(marked(job.rank), 1, name="huge")
    check(result, {place: i + 11 for i, place in enumerate(PLACES)})


@huge
def test_allgather(job) -> None:
    needs(job, 13)
    count = 2**30 + 3
    mine = [i for i, place in enumerate(PLACES) if place < count]
    result = gr.allgather(marked(job.rank, count), name="huge")
    assert result.shape == (2 * count,)
    check(result, {PLACES[i] + r * count: i + 1 + 10 * r for i in mine for r in (0, 1)})


@huge
def test_reducescatter(job) -> None:
    needs(job, 13)
    result = gr.reducescatter(marked(job.rank), gr.Sum, name="huge")
    first = (COUNT + 1) // 2
    begin, end = (0, first) if job.rank == 0 else (first, COUNT)
    assert result.shape == (end - begin,)
    sums = {place: 2 * (i + 1) + 10 for i, place in enumerate(PLACES)}
    check(result, {place - begin: s for place, s in sums.items() if begin <= place < end})


@huge
def test_alltoall(job) -> None:
    needs(job, 13)
    splits = [5, 2**31]  # all but a few rows go to rank 1
    result, received = gr.alltoall(marked(job.rank), splits, name="huge")
    rows = 5 if job.rank == 0 else 2**31
    assert received.tolist() == [rows, rows]
    begin = 0 if job.rank == 0 else 5
    mine = [(i, p - begin) for i, p in enumerate(PLACES) if begin <= p < begin + rows]
    check(result, {p + r * rows: i + 1 + 10 * r for i, p in mine for r in (0, 1)})
