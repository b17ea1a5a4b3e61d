"""Calls on arrays that are started now and waited for later."""

from __future__ import annotations

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


def test_results_are_those_of_the_calls_that_wait(rank: int, size: int) -> None:
    mine = np.arange(12, dtype=np.float32).reshape(6, 2) * (rank + 1)
    rows = np.arange(size * 2, dtype=np.int64) + 100 * rank
    counts = [2] * size
    pairs = [
        (gr.allreduce_async(mine, gr.Sum), gr.allreduce(mine, gr.Sum)),
        (gr.allreduce_async(mine, prescale_factor=0.5), gr.allreduce(mine, prescale_factor=0.5)),
        (gr.reducescatter_async(mine, gr.Max), gr.reducescatter(mine, gr.Max)),
        (gr.allgather_async(rows[: rank + 1]), gr.allgather(rows[: rank + 1])),
        (gr.broadcast_async(mine, size - 1), gr.broadcast(mine, size - 1)),
        (gr.alltoall_async(rows), gr.alltoall(rows)),
    ]
    for handle, expected in pairs:
        result = gr.synchronize(handle)
        assert gr.poll(handle)
        assert result.dtype == expected.dtype
        assert np.array_equal(result, expected)
    many = gr.grouped_allreduce_async([mine, rows], gr.Sum).wait()
    assert np.array_equal(many[0], gr.allreduce(mine, gr.Sum))
    assert np.array_equal(many[1], gr.allreduce(rows, gr.Sum))
    parts, received = gr.alltoall_async(rows, counts).wait(60)
    assert parts.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in (0, 1)]
    assert received.tolist() == counts


def test_many_in_flight_of_one_name_ended_in_any_order(rank: int, size: int) -> None:
    inputs = [np.full(1000, float(i + rank)) for i in range(20)]
    handles = [gr.allreduce_async(array, gr.Sum, "same") for array in inputs]
    for i in reversed(range(20)):
        expected = size * i + size * (size - 1) / 2
        assert (handles[i].wait() == expected).all()
        assert (handles[i].wait() == expected).all()  # again


def test_many_at_once_in_another_order_on_each_rank(rank: int, size: int) -> None:
    """Through the board, the window and slots, in place and in the shared buffer."""
    counts = [1, 900, 4000, 30_000, 300_000, 0]
    numbers = [i * (2 * rank + 1) % 32 for i in range(32)]  # odd: each once
    for step in range(4):
        handles = {}
        for i in numbers:
            array = np.full(counts[i % 6], i + rank + step, np.float32 if i % 4 else np.int64)
            if i % 9 == 8:
                handles[i] = gr.allgather_async(array[: rank + 1], f"call {i}")
            else:
                handles[i] = gr.allreduce_async(array, gr.Sum, f"call {i}")
        for i, handle in handles.items():
            result = handle.wait()
            if i % 9 == 8:
                rows = [min(r + 1, counts[i % 6]) for r in range(size)]
                expected = np.repeat(np.arange(size) + i + step, rows)
                assert np.array_equal(result, expected)
            else:
                assert len(result) == counts[i % 6]
                assert (result == size * (i + step) + size * (size - 1) // 2).all()


def test_into_an_array_of_the_caller(size: int) -> None:
    array = np.ones(1 << 16, np.float32)
    handle = gr.allreduce_async(array, gr.Sum, out=array)
    assert handle.wait() is array
    assert (array == size).all()


def test_a_rank_that_does_not_come_is_a_timeout(job, size: int) -> None:
    if size == 1:
        return
    late = job.rank == size - 1
    if not late:
        handle = gr.allreduce_async(np.ones(3), gr.Sum, "late")
        assert not handle.done()
        with pytest.raises(gr.Timeout, match="late"):
            handle.wait(0.01)
    job.barrier()
    if late:
        handle = gr.allreduce_async(np.ones(3), gr.Sum, "late")
    assert (handle.wait() == size).all()


def test_what_ranks_disagree_on_is_raised_by_wait(rank: int, size: int) -> None:
    if size == 1:
        return
    handle = gr.allreduce_async(np.ones(3 + rank, np.float32), gr.Sum, "shapes")
    with pytest.raises(gr.Mismatch, match=r"shapes"):
        handle.wait()
    assert handle.done()
    assert (gr.allreduce_async(np.ones(2), gr.Sum, "good").wait() == size).all()


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(gr.InvalidArgument, match="no_dtype"):
        gr.allreduce_async(np.array(["text"]), name="no_dtype")
    assert gr.grouped_allreduce_async([]).wait() == []
    handle = gr.allreduce_async(np.ones(2))
    for timeout in (-1.0, float("nan")):
        with pytest.raises(gr.InvalidArgument, match=r"timeout=.*: expected None or seconds"):
            handle.wait(timeout)
    assert handle.wait(float("inf")).tolist() == [1.0, 1.0]
