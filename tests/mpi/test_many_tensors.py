"""P6: thousands of tensors, in one call and under names of their own."""

from __future__ import annotations

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(2, 3)


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
    total = size * (size - 1) // 2
    for i in range(2000):
        assert gr.allreduce(i + rank, gr.Sum, name=f"name {i}") == size * i + total
    for i in reversed(range(0, 2000, 100)):
        assert gr.allreduce(i + rank, gr.Sum, name=f"name {i}") == size * i + total
