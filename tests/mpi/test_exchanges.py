"""alltoall, reducescatter and grouped gathers of the neutral API against NumPy."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import gradred as gr
from mpi.neutral_values import DTYPES, OPS, reference, values

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


def same(result: np.ndarray, expected: np.ndarray) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert (result == expected).all(), f"{result}\nis not\n{expected}"


def scattered(whole: np.ndarray, rank: int, size: int) -> np.ndarray:
    """The lower ranks get one row more, as numpy.array_split has it."""
    return np.array_split(whole, size)[rank]


def works(size: int) -> None:
    assert (gr.allreduce(np.ones(3), gr.Sum, name="after") == size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rest", [(), (3,), (2, 2), (0,)], ids=str)
def test_alltoall_with_splits(rank, size, dtype, rest) -> None:
    patterns = {
        "ring": lambda a, b: a + 2 * b,
        "to the last": lambda a, b: 3 if b == size - 1 else 0,
        "from the first": lambda a, b: b + 1 if a == 0 else 0,
        "nothing": lambda a, b: 0,
    }
    for rows in patterns.values():
        table = np.array([[rows(a, b) for b in range(size)] for a in range(size)])
        inputs = [values(a, (table[a].sum(), *rest), dtype) for a in range(size)]
        parts = [np.split(inputs[a], np.cumsum(table[a])[:-1]) for a in range(size)]
        result, received = gr.alltoall(inputs[rank], table[rank])
        same(result, np.concatenate([parts[a][rank] for a in range(size)]))
        same(received, table[:, rank])


def test_alltoall_of_equal_parts(rank, size) -> None:
    for rows in (0, 1, 3):
        inputs = [values(a, (rows * size, 2), np.dtype("int32")) for a in range(size)]
        expected = np.concatenate([np.split(x, size)[rank] for x in inputs])
        result = gr.alltoall(inputs[rank])
        assert isinstance(result, np.ndarray)
        same(result, expected)
        # Splits are each rank's own affair.
        if rank == 0:
            result, received = gr.alltoall(inputs[rank], [rows] * size, name="some give splits")
            assert list(received) == [rows] * size
        else:
            result = gr.alltoall(inputs[rank], name="some give splits")
        same(result, expected)


def test_alltoall_of_many_bytes(rank, size) -> None:
    count = (1 << 20) + 7
    table = [[count + a * size + b for b in range(size)] for a in range(size)]
    mine = np.concatenate(
        [np.full(n, rank * size + b, np.float32) for b, n in enumerate(table[rank])]
    )
    result, received = gr.alltoall(mine, table[rank])
    assert list(received) == [table[a][rank] for a in range(size)]
    same(result, np.repeat(np.arange(size, dtype=np.float32) * size + rank, received))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reducescatter(rank, size, dtype, op) -> None:
    if dtype.kind == "b" and op == gr.Average:
        with pytest.raises(gr.InvalidArgument, match="bool"):
            gr.reducescatter(np.zeros(3, bool), op)
        return
    exact = op != gr.Average or dtype.kind in "iu" or size != 3
    limit = 0.0 if exact else 16 * float(ml_dtypes.finfo(dtype).eps)  # as for allreduce
    for shape in ((0,), (1,), (2,), (7,), (8, 3), (5, 2, 2), (4, 0), (0, 3), (1025, 3)):
        result = gr.reducescatter(values(rank, shape, dtype), op)
        expected = scattered(reference(op, shape, dtype, size), rank, size)
        assert result.dtype == dtype
        assert result.shape == expected.shape
        error = np.abs(result.astype(np.float64) - expected.astype(np.float64))
        assert (error <= limit).all(), f"{shape}: {result}\nis not\n{expected}"


def test_reducescatter_scales(rank, size) -> None:
    x = np.array([1.0, 3.0, 1e-30, 7.0])
    whole = sum([x * 0.1] * size, np.zeros(4))
    result = gr.reducescatter(x, gr.Sum, prescale_factor=0.1, postscale_factor=4.0)
    same(result, scattered(whole * 4.0, rank, size))
    result = gr.reducescatter(np.full(5, 6, np.int32), postscale_factor=2.0)
    same(result, scattered(np.full(5, 12, np.int32), rank, size))


def test_reducescatter_averages_do_not_overflow(rank, size) -> None:
    for value, dtype in ((2**62, "int64"), (-(2**63), "int64"), (100, "int8"), (40000, "float16")):
        x = np.full(4, value, dtype)
        same(gr.reducescatter(x), scattered(x, rank, size))


def test_reducescatter_wires_count_overflow(rank, size) -> None:
    x = np.full(4, 1.5, np.float32)
    same(gr.reducescatter(x, gr.Sum, wire="float16"), scattered(x * size, rank, size))
    before = gr.metrics().saturated
    result = gr.reducescatter(np.full(4, 1e5, np.float32), gr.Sum, wire="float16")
    assert np.isinf(result).all()
    assert gr.metrics().saturated == before + 4


def test_groups(rank, size) -> None:
    dtypes = [np.dtype("float32"), np.dtype("int8"), np.dtype(ml_dtypes.bfloat16), np.dtype("bool")]
    shapes = [(rank + 1, 2), (rank,), (0, 3), (2,)]
    inputs = [values(rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
    results = gr.grouped_allgather(inputs)
    all_shapes = [[(r + 1, 2), (r,), (0, 3), (2,)] for r in range(size)]
    for i, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
        same(result, np.concatenate([values(r, all_shapes[r][i], dtype) for r in range(size)]))
    assert gr.grouped_allgather([]) == []

    shapes = [(5, 2), (1,), (0, 3), (4,)]
    inputs = [values(rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
    results = gr.grouped_reducescatter(inputs, gr.Sum)
    for result, shape, dtype in zip(results, shapes, dtypes, strict=True):
        same(result, scattered(reference(gr.Sum, shape, dtype, size), rank, size))
    assert gr.grouped_reducescatter([]) == []


@pytest.mark.ranks(3)
def test_process_sets(rank) -> None:
    pair = gr.add_process_set([0, 2])
    if rank == 1:
        for call in (gr.alltoall, gr.reducescatter):
            with pytest.raises(gr.InvalidArgument, match="rank 1 is no member"):
                call(np.zeros(2), process_set=pair)
        return
    result, received = gr.alltoall(np.array([rank] * 3), [1, 2], process_set=pair)
    mine = 1 if rank == 0 else 2
    same(result, np.repeat([0, 2], mine))
    assert list(received) == [mine, mine]
    result = gr.reducescatter(np.arange(3), gr.Sum, process_set=pair)
    same(result, np.array([0, 2] if rank == 0 else [4]))


# ---- errors


@pytest.mark.parametrize(
    "splits",
    [
        lambda n: [4 - n, *[1] * (n - 1)] if n > 1 else [5],  # the sum is 3, or 5
        lambda n: [-1, *[0] * (n - 2), 5] if n > 1 else [-4],
        lambda n: [*[0] * n, 4],
        lambda n: [],
        lambda n: [2**62] * (4 * n),
    ],
)
def test_splits_that_do_not_fit(rank, size, splits) -> None:
    wrong = splits(size)
    with pytest.raises(gr.InvalidArgument) as caught:
        gr.alltoall(np.zeros((4, 2)), wrong, name="unfit")
    text = str(caught.value)
    assert "'unfit'" in text and f"rank {rank} in process set 0" in text
    assert f"{size} numbers of rows from 0 with the sum 4, got [" in text
    works(size)


@pytest.mark.ranks(2, 3)
def test_splits_that_do_not_fit_on_one_rank(rank, size) -> None:
    splits = [1] * size
    if rank == 1:
        splits[0] = 2
    kind = gr.InvalidArgument if rank == 1 else gr.Abandoned
    with pytest.raises(kind, match=r"with the sum \d, got \[2, 1"):
        gr.alltoall(np.zeros(size), splits, name="one")
    works(size)
    result, _ = gr.alltoall(np.arange(size), [1] * size, name="one")
    same(result, np.full(size, rank))


def test_what_was_refused_is_let_go(rank, size) -> None:
    array = np.zeros((4, 2))
    alive = weakref.ref(array)
    with pytest.raises(gr.InvalidArgument):
        gr.alltoall(array, [5], name="refused")
    del array
    works(size)
    gc.collect()
    assert alive() is None


def test_splits_of_another_kind(rank, size) -> None:
    for splits in ([0.5] * size, "ab", np.ones((1, size), np.int64), 4, [True] * size):
        with pytest.raises(gr.InvalidArgument, match=rf"rank {rank}.*list of integers, got"):
            gr.alltoall(np.zeros(size), splits)


@pytest.mark.ranks(2, 3)
def test_rows_that_are_no_multiple(rank, size) -> None:
    with pytest.raises(gr.InvalidArgument, match=f"a multiple of {size}.*got {size + 1}"):
        gr.alltoall(np.zeros(size + 1))
    works(size)


def test_scalars_are_refused() -> None:
    for call in (gr.alltoall, gr.reducescatter):
        with pytest.raises(gr.InvalidArgument, match=r"'loss'.*scalar"):
            call(1.0, name="loss")
    for call in (gr.grouped_allgather, gr.grouped_reducescatter):
        with pytest.raises(gr.InvalidArgument, match=r"'loss'.*array 1.*scalar"):
            call([[1.0], 1.0], name="loss")
    with pytest.raises(gr.Unsupported, match="Adasum"):
        gr.reducescatter(np.zeros(2), gr.Adasum)


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree(job, rank, size) -> None:
    odd = rank == 1
    calls = {
        "columns": lambda: gr.alltoall(np.zeros((size, 3 if odd else 2)), name="columns"),
        "dtype": lambda: gr.alltoall(np.zeros(size, "i4" if odd else "f4"), name="dtype"),
        "rows": lambda: gr.reducescatter(np.zeros((3 if odd else 4, 2)), name="rows"),
        "op": lambda: gr.reducescatter(np.zeros(4), gr.Max if odd else gr.Min, name="op"),
        "scale": lambda: gr.reducescatter(np.zeros(4), prescale_factor=1.0 + odd, name="scale"),
        "kind": lambda: (gr.alltoall if odd else gr.allgather)(np.zeros(size), name="kind"),
        "group": lambda: gr.grouped_allgather([np.zeros((2, 2 + odd)), np.zeros(1)], name="group"),
        "length": lambda: gr.grouped_allgather([np.zeros(1)] * (2 + odd), name="length"),
    }
    for name, call in calls.items():
        with pytest.raises(gr.Mismatch, match=name) as caught:
            call()
        texts = job.exchange(str(caught.value))
        assert len(set(texts)) == 1, texts
        works(size)


@pytest.mark.ranks(2)
def test_while_a_rank_has_joined(rank) -> None:
    if rank == 0:
        gr.join()
        return
    for call in (lambda: gr.alltoall(np.zeros(2)), lambda: gr.reducescatter(np.zeros(2))):
        with pytest.raises(gr.InvalidArgument, match="joined"):
            call()
    gr.join()
