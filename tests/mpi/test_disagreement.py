"""Ranks that disagree get the same error, and go on."""

from __future__ import annotations

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


def mismatch(job, call) -> str:
    """The text of the Mismatch that all ranks raise alike; the next call works."""
    with pytest.raises(gr.Mismatch) as caught:
        call()
    texts = job.exchange(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert (gr.allreduce(np.ones(3), gr.Sum, name="after") == job.size).all()
    return texts[0]


def test_first_shape_of_a_group(job) -> None:
    first = np.zeros((4, 2) if job.rank == 1 else (3, 2), np.float32)
    others = [np.zeros(5, np.float32), np.zeros(6, np.float32)]
    text = mismatch(job, lambda: gr.grouped_allreduce([first, *others], name="g"))
    assert "g/0" in text
    assert "[3, 2]" in text
    assert "[4, 2]" in text
    assert "1" in text


def test_shape_of_a_known_name(job) -> None:
    gr.allreduce(np.zeros(3), name="known")
    count = 4 if job.rank == 0 else 3
    text = mismatch(job, lambda: gr.allreduce(np.zeros(count), name="known"))
    assert "known" in text
    assert "[3]" in text
    assert "[4]" in text
    gr.allreduce(np.zeros(3), name="known")


def test_dtype(job) -> None:
    dtype = np.float64 if job.rank == 0 else np.float32
    text = mismatch(job, lambda: gr.allreduce(np.zeros(3, dtype), name="d"))
    assert "float64" in text
    assert "float32" in text


def test_operation(job) -> None:
    call = gr.allgather if job.rank == 0 else gr.allreduce
    text = mismatch(job, lambda: call(np.zeros(3), name="o"))
    assert "allgather" in text
    assert "allreduce" in text


def test_reduction_scale_wire_and_root(job) -> None:
    odd = job.rank == 1
    x = np.zeros(3, np.float32)
    assert "min" in mismatch(job, lambda: gr.allreduce(x, gr.Min if odd else gr.Max, name="r"))
    text = mismatch(job, lambda: gr.allreduce(x, prescale_factor=0.5 if odd else 1.0, name="s"))
    assert "0.5" in text
    wire = "float16" if odd else "none"
    assert "float16" in mismatch(job, lambda: gr.allreduce(x, wire=wire, name="w"))
    mismatch(job, lambda: gr.broadcast(x, int(odd), name="b"))


def test_length_of_a_group(job) -> None:
    arrays = [np.zeros(2)] * (2 + (job.rank == 0))
    assert "l" in mismatch(job, lambda: gr.grouped_allreduce(arrays, name="l"))


def test_rank_of_an_allgather(job) -> None:
    shape = (2, 3) if job.rank == 0 else (2, 4)
    assert "ag" in mismatch(job, lambda: gr.allgather(np.zeros(shape), name="ag"))


def test_process_sets_that_differ(job) -> None:
    ranks = [0] if job.rank == 0 else [0, 1]
    mismatch(job, lambda: gr.add_process_set(ranks))
