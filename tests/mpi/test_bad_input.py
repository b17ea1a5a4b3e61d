"""What is wrong with a call is found before anybody waits, and the next call works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(1, 2)

Row = tuple[Callable[[], Any], type[Exception], str]

REDUCTIONS = (gr.allreduce, gr.reducescatter)
EXCHANGES = (gr.allgather, gr.alltoall)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


def each(calls: tuple[Any, ...], *arguments: Any, **options: Any) -> Iterator[Callable[[], Any]]:
    for call in calls:
        yield lambda call=call: call(*arguments, **options)


def rows() -> Iterator[Row]:
    """(call, error, text)"""
    x, size = np.ones((12, 2), np.float32), gr.size()
    for root in (-1, size, "0", None, 0.5):
        yield lambda root=root: gr.broadcast(x, root), gr.InvalidArgument, f"root_rank={root!r}"
    for call in each((gr.reducescatter, *EXCHANGES), np.float32(1.0)):
        yield call, gr.InvalidArgument, "scalar"
    for call in each((gr.grouped_allgather, gr.grouped_reducescatter), [x, np.float32(1.0)]):
        yield call, gr.InvalidArgument, "array 1: a scalar"
    for value, text in (
        (np.array(["a"]), "dtype str"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, complex), "dtype complex128"),
        ([[1.0], [1.0, 2.0]], "no array"),
        (object(), "dtype object"),
    ):
        for call in each((*REDUCTIONS, *EXCHANGES), value):
            yield call, gr.InvalidArgument, text
        yield lambda v=value: gr.broadcast(v, 0), gr.InvalidArgument, text
    for call in each(REDUCTIONS, np.array([True, False])):
        yield call, gr.InvalidArgument, "bool has no average"
    for dtype in (np.int64, np.uint64):
        for call in each(REDUCTIONS, np.ones(4, dtype), prescale_factor=2.0):
            yield call, gr.InvalidArgument, "takes no prescale"
    for op, error in ((17, gr.InvalidArgument), ("sum", gr.InvalidArgument), (2, gr.Unsupported)):
        for call in each(REDUCTIONS, x, op):
            yield call, error, "Adasum" if op == 2 else f"op={op!r}"
    for factor in (float("nan"), float("inf"), "2", None, 1j):
        for name in ("prescale_factor", "postscale_factor"):
            for call in each(REDUCTIONS, x, **{name: factor}):
                yield call, gr.InvalidArgument, f"{name}={factor!r}"
    for wire in ("zip", 16, "float32"):
        for call in each(REDUCTIONS, x, wire=wire):
            yield call, gr.InvalidArgument, f"wire={wire!r}"
    for splits, text in (
        ([1.0] * size, "float64"),
        ([[1]], "a list of integers"),
        ([12 + size] + [0] * (size - 1), "splits"),
        ([-1] + [13] * (size - 1), "splits"),
        ([12] * (size + 1), "splits"),
        ("12", "a list of integers"),
    ):
        yield lambda s=splits: gr.alltoall(x, s), gr.InvalidArgument, text
    yield (
        lambda: gr.alltoall(np.ones(2 * size + 1)),
        *((gr.InvalidArgument, "multiple") if size > 1 else (gr.InvalidArgument, "")),
    )
    for process_set in ([0], 0, None, "all"):
        text = f"process_set={process_set!r}: expected a ProcessSet"
        for call in each((*REDUCTIONS, *EXCHANGES), x, process_set=process_set):
            yield call, gr.InvalidArgument, text
        for call in each((gr.barrier,), process_set=process_set):
            yield call, gr.InvalidArgument, text
    for call in each((*REDUCTIONS, *EXCHANGES), x, process_set=gr.ProcessSet([0])):
        yield call, gr.InvalidArgument, "not registered"
    for name in (3, b"x", ["x"], "half \udc80"):
        for call in each((*REDUCTIONS, *EXCHANGES), x, name=name):
            yield call, gr.InvalidArgument, f"name={name!r}: expected text"
        for call in each((gr.barrier,), name):
            yield call, gr.InvalidArgument, f"name={name!r}: expected text"
    for call in (gr.grouped_allreduce, gr.grouped_allgather, gr.grouped_reducescatter):
        for value in (3, None, x, "ab"):
            yield lambda c=call, v=value: c(v), gr.InvalidArgument, "a list of tensors"
    for ranks in ([], [0, 0], [-1], [size]):
        yield lambda r=ranks: gr.add_process_set(r), gr.InvalidArgument, "rank"


def test_rows(size: int) -> None:
    for number, (call, error, text) in enumerate(rows()):
        if not text:
            continue
        with pytest.raises(error) as caught:
            call()
        assert text in str(caught.value), f"row {number}"
    assert (gr.allreduce(np.ones(3), gr.Sum, name="after") == size).all()
