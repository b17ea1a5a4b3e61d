"""Objects: what is no plain data, and what cannot be pickled."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


class Unpicklable:
    def __init__(self, why: str = "not this one") -> None:
        self.why = why

    def __reduce__(self):
        raise TypeError(self.why)


def test_sizes_that_differ(rank, size) -> None:
    objects = [{"rank": r, "x": np.arange(r * 1000)} for r in range(size)]
    for got, expected in zip(gr.allgather_object(objects[rank]), objects, strict=True):
        assert got["rank"] == expected["rank"]
        assert (got["x"] == expected["x"]).all()
    assert gr.broadcast_object(None) is None


@pytest.mark.skipif(importlib.util.find_spec("cloudpickle") is None, reason="needs cloudpickle")
def test_functions_without_a_name(rank, size) -> None:
    functions = gr.allgather_object(lambda x: x + rank)
    assert [f(1) for f in functions] == [r + 1 for r in range(size)]


def test_what_cannot_be_pickled(rank, size) -> None:
    bad = size - 1
    mine = Unpicklable() if rank == bad else [rank]
    kind = gr.InvalidArgument if rank == bad else gr.Abandoned
    with pytest.raises(kind, match=rf"rank {bad}: Unpicklable: TypeError: not this one"):
        gr.broadcast_object(mine, bad)
    with pytest.raises(kind, match=rf"rank {bad}: Unpicklable"):
        gr.allgather_object(mine)
    for text in ("file \udce9", "\ud800" * 2000):  # as of a file's name that is no UTF-8
        mine = Unpicklable(text) if rank == bad else [rank]
        with pytest.raises(kind, match=r"TypeError: (file \\udce9|\\ud800)"):
            gr.allgather_object(mine)
    assert gr.allgather_object(rank) == list(range(size))
