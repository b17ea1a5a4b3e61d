"""Ranks that disagree get the same error, other tensors go on, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradred as gr
from gradred import _core
from mpi.disagreements import CASES, Case, is_told_alike

pytestmark = pytest.mark.ranks(2, 3, 4)

Call = Callable[[], Any]


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


def mismatch(job, call: Call) -> str:
    """The text of the Mismatch that all ranks raise alike."""
    with pytest.raises(gr.Mismatch) as caught:
        call()
    texts = job.exchange(str(caught.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


def start_another(size: int) -> Call:
    """Begins an allreduce of another name; what is returned waits for it and checks it."""
    entry = {
        **{"label": "another", "op": "allreduce", "reduce_op": "sum", "dtype": "float64"},
        **{"wire": "float64", "shape": [5], "prescale": 1.0, "postscale": 1.0, "root": 0},
    }
    handle = _core.start(_core.Spec("another", 0, [entry], []), [np.arange(5.0)])

    def check() -> None:
        [(result, present, _)] = handle.wait(30)
        assert result is not None and present == size
        assert (result == size * np.arange(5.0)).all()

    return check


def arrays(tensors: list[tuple[tuple[int, ...], str]]) -> list[np.ndarray]:
    return [np.ones(shape, dtype) for shape, dtype in tensors]


def run(case_call: tuple[str, list[tuple[tuple[int, ...], str]], dict[str, Any]], name: str) -> Any:
    """One call of the table on arrays."""
    operation, tensors, options = case_call
    function = getattr(gr, operation)
    if operation == "barrier":
        return function(name=name)
    options = {key: getattr(gr, v) if key == "op" else v for key, v in options.items()}
    if operation == "broadcast":
        options.setdefault("root_rank", 0)
    first = arrays(tensors) if operation.startswith("grouped_") else arrays(tensors)[0]
    return function(first, name=name, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_arrays(job, case: Case) -> None:
    name = f"table {case}"
    odd = case.number % job.size
    mine = case.odd if job.rank == odd else case.right
    for _ in range(2):  # of a new name, and of one that the ranks had agreed on
        check_other = start_another(job.size)
        text = mismatch(job, lambda: run(mine, name))
        is_told_alike(text, case, name, odd, job.size)
        check_other()
        run(case.right, name)


def test_splits_on_one_rank(job) -> None:
    """The rank whose splits do not fit hears so, the others that it gave up."""
    size, last = job.size, job.size - 1
    good = [2] + [1] * last
    x = np.zeros((size + 1, 2))
    for bad in ([1] * size, [-1, size + 2] + [0] * (size - 2), good[:-1], [*good, 0]):
        expected = gr.InvalidArgument if job.rank == last else gr.Abandoned
        with pytest.raises(expected, match="splits") as caught:
            gr.alltoall(x, bad if job.rank == last else good, name="splits")
        assert f"rank {last}" in str(caught.value) and str(bad)[1:-1] in str(caught.value)
    rows, received = gr.alltoall(x, good, name="splits")
    assert received.tolist() == [2 if job.rank == 0 else 1] * size
    assert rows.shape == (sum(received), 2)


def test_process_sets_that_differ(job) -> None:
    ranks = [0] if job.rank == 0 else [0, 1]
    mismatch(job, lambda: gr.add_process_set(ranks))
    assert (gr.allreduce(np.ones(3), gr.Sum, name="after") == job.size).all()


@pytest.mark.ranks(3, 4)
def test_in_a_process_set(job) -> None:
    """Its members alone hear of it; the text has their ranks in the world and the set's number."""
    pair = gr.add_process_set([0, 2])
    if job.rank in pair.ranks:
        x = np.zeros(3 + job.rank)
        with pytest.raises(gr.Mismatch) as caught:
            gr.allreduce(x, name="pair", process_set=pair)
        text = str(caught.value)
        assert "rank 0: allreduce" in text and "rank 2: allreduce" in text
        assert f"process set {pair.process_set_id}" in text
        assert gr.allreduce(np.ones(1), gr.Sum, name="pair", process_set=pair).tolist() == [2]
    texts = job.exchange(text if job.rank in pair.ranks else "")
    assert texts[0] == texts[2] and not texts[1]
    assert (gr.allreduce(np.ones(3), gr.Sum, name="after") == job.size).all()


def test_one_name_for_operations_in_turn(job) -> None:
    """H1: what a name stood for before does not matter."""
    x = np.arange(12.0).reshape(6, 2) + job.rank
    everyone = [np.arange(12.0).reshape(6, 2) + rank for rank in range(job.size)]
    total = np.sum(everyone, 0)
    mine = np.array_split(np.arange(6), job.size)[job.rank]
    for _ in range(3):
        assert (gr.allreduce(x, gr.Sum, name="turn") == total).all()
        assert (gr.reducescatter(x, gr.Sum, name="turn") == total[mine]).all()
        assert (gr.allgather(x, name="turn") == np.concatenate(everyone)).all()
        assert (gr.broadcast(x, 1, name="turn") == everyone[1]).all()
        [first, second] = gr.grouped_allreduce([x, 2 * x], gr.Sum, name="turn")
        assert (first == total).all() and (second == 2 * total).all()
        gr.barrier("turn")
