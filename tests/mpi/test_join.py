"""Ranks with different numbers of steps."""

from __future__ import annotations

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


@pytest.mark.parametrize("extra", [1, 3])
def test_one_rank_has_more_steps(rank: int, size: int, extra: int) -> None:
    steps = [2 + (extra if r == size - 1 else 0) for r in range(size)]
    for step in range(steps[rank]):
        active = sum(step < n for n in steps)
        total = gr.grouped_allreduce([np.ones(3), np.ones((2, 2), np.int32)], gr.Sum, name="step")
        assert (total[0] == active).all()
        assert (total[1] == active).all()
        assert (gr.allreduce(np.full(4, -2.0), gr.Max, name="max") == -2).all()
        mean = gr.allreduce(np.ones(1), gr.Average, name="mean")
        assert mean == active / size
    last = gr.join()
    assert last == size - 1
    assert (gr.allreduce(np.ones(2), gr.Sum, name="after") == size).all()


def test_new_names_while_others_have_joined(rank: int, size: int) -> None:
    if rank == size - 1:
        for i in range(3):
            assert (gr.allreduce(np.ones(5), gr.Sum, name=f"only here {i}") == 1).all()
    assert gr.join() == size - 1
