"""P6: thousands of tensors, in one call and under names of their own."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(2, 3)

LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


def test_in_one_call(rank: int, size: int) -> None:
    arrays = [np.full(1 + i % 7, i + rank, np.int32) for i in range(5000)]
    total = size * (size - 1) // 2
    for _ in range(2):
        results = gr.grouped_allreduce(arrays, gr.Sum, name="thousands")
        assert all((r == size * i + total).all() for i, r in enumerate(results))
        assert [r.shape for r in results] == [a.shape for a in arrays]


def test_under_names_of_their_own(rank: int, size: int) -> None:
    """Two thousand groups that come again, in a process that may open 256 files."""
    total = size * (size - 1) // 2
    values = {i: np.arange(1 + 37 * i % 3000, dtype=np.int32) for i in range(2000)}
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, LIMITS[1]))
    try:
        for order in (range(2000), reversed(range(2000)), range(0, 2000, 3)):
            for i in order:
                result = gr.allreduce(values[i] + rank, gr.Sum, name=f"name {i}")
                np.testing.assert_array_equal(result, size * values[i] + total)
        assert len(os.listdir("/proc/self/fd")) < before + 16
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, LIMITS)
