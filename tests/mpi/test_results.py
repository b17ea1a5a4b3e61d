"""Where results of the neutral API lie: in arrays that the caller gives, and in kept memory."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_out(rank: int, size: int, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for count in (0, 1, 1000, 300_000):
        mine = np.full((count, 2), rank + 1).astype(kind)
        expected = gr.allreduce(mine, gr.Sum)
        out = np.zeros_like(mine)
        assert gr.allreduce(mine, gr.Sum, out=out) is out
        assert (out == expected).all()
        assert (mine == np.full((count, 2), rank + 1).astype(kind)).all()
        assert gr.allreduce(mine, gr.Sum, out=mine) is mine  # in place
        assert (mine == expected).all()


def test_out_on_one_rank_only(rank: int, size: int) -> None:
    mine = np.arange(10.0)
    out = np.empty(10) if rank == 0 else None
    result = gr.allreduce(mine, gr.Sum, name="some", out=out)
    assert (result == size * mine).all()
    assert rank != 0 or result is out


def test_out_takes_a_strided_input(size: int) -> None:
    mine = np.arange(20.0).reshape(4, 5)
    out = np.empty((5, 4))
    gr.allreduce(mine.T, gr.Sum, out=out)
    assert (out == size * mine.T).all()


def test_wrong_outs() -> None:
    mine = np.zeros((3, 4), np.float32)
    frozen = np.zeros((3, 4), np.float32)
    frozen.flags.writeable = False
    memory = np.zeros(20, np.float32)
    for out, text in (
        ([0.0], "expected a NumPy array, got list"),
        (np.zeros((3, 4)), "expected dtype float32"),
        (np.zeros((3, 4), ">f4"), "byte order"),
        (np.zeros((4, 3), np.float32), r"expected shape \(3, 4\), got \(4, 3\)"),
        (np.zeros((4, 3), np.float32).T, "C-contiguous"),
        (frozen, "can be written"),
    ):
        with pytest.raises(gr.InvalidArgument, match=rf"allreduce of 'x': out: .*{text}"):
            gr.allreduce(mine, name="x", out=out)
    with pytest.raises(gr.InvalidArgument, match="out: shares some of the input's memory"):
        gr.allreduce(memory[:12], name="x", out=memory[4:16])


def waited_for(*args: Any, **options: Any) -> np.ndarray:
    return gr.allreduce_async(*args, **options).wait()


@pytest.mark.parametrize("allreduce", [gr.allreduce, waited_for])
def test_a_known_call(allreduce: Callable[..., np.ndarray], size: int) -> None:
    """A call that was good before is not checked anew, but for what may differ in it."""
    mine = np.arange(12, dtype=np.float32).reshape(3, 4)
    half = mine.astype(ml_dtypes.bfloat16)

    def total(array: object, out: np.ndarray | None = None) -> np.ndarray:
        result = allreduce(array, gr.Sum, name="known", out=out)
        assert out is None or result is out
        return result

    for _ in range(2):
        assert (total(mine) == size * mine).all()
        for other in (mine[::-1], mine.copy(order="F"), mine.astype(">f4"), half, mine.T, mine[0]):
            result = total(other)
            assert (result == size * other).all()
            assert result.dtype == other.dtype.newbyteorder("=")
        assert (total(mine.tolist()) == size * mine).all()
        for array in (mine, mine[0], mine.astype(np.int32)):  # of one line
            assert (allreduce(array, gr.Sum) == size * array).all()
    memory = np.zeros(20, np.float32)
    frozen = mine.copy()
    frozen.flags.writeable = False
    total(memory[:12], out=memory[:12])
    for array, out in (
        (memory[:12], memory[4:16]),
        (mine, mine[::-1]),
        (mine, frozen),
        (mine, half),
        (mine, np.zeros((4, 3), np.float32)),
        (mine, mine.tolist()),
    ):
        with pytest.raises(gr.InvalidArgument, match="allreduce of 'known': out: "):
            total(array, out=out)
    with pytest.raises(gr.InvalidArgument, match="op="):
        allreduce(mine, [gr.Sum], name="known")


def test_memory_of_results_is_used_again(rank: int) -> None:
    mine = np.ones(4 << 20, np.float32)
    for _ in range(3):
        result = gr.allreduce(mine, name="warm")  # two are alive at once, as below
    gc.collect()
    before, faults = gr.metrics(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        result = gr.allreduce(mine, name="warm")
        assert result[-1] == 1
    after = gr.metrics()
    assert after.pool_fresh == before.pool_fresh
    assert after.pool_reused == before.pool_reused + 10
    # Ten results of fresh pages would be 40,000.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 4000
    assert after.pool_nbytes <= 3 * mine.nbytes


def test_results_do_not_share_memory() -> None:
    mine = np.ones(100_000, np.float32)
    results = [gr.allreduce(mine * i, gr.Average, name="each") for i in range(8)]
    for i, result in enumerate(results):
        assert (result == i).all()
        result += 1
    for i, result in enumerate(results):
        assert (result == i + 1).all()


def test_tensors_are_packed_early(job) -> None:
    arrays = [np.full(100, i, np.float32) for i in range(10)]
    before = gr.metrics().packed_early
    for _ in range(5):
        for i, result in enumerate(gr.grouped_allreduce(arrays, gr.Average, name="group")):
            assert (result == i).all()
    assert gr.metrics().packed_early - before == 30  # all but those of the first two runs
