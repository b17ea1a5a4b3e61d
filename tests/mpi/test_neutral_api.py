"""Values of the neutral API against NumPy, inside the ranks."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import gradred as gr
from mpi.neutral_values import DTYPES, OPS, SHAPES, reference, values

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


def same(result: np.ndarray, expected: np.ndarray) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert (result == expected).all(), f"{result}\nis not\n{expected}"


def tolerance(dtype: np.dtype, op: gr.ReduceOp, ranks: int) -> float:
    """Only means over three ranks are inexact: inputs up to 3, rounded a few times."""
    if op != gr.Average or dtype.kind in "iub" or ranks in (1, 2, 4):
        return 0.0
    return 16 * float(ml_dtypes.finfo(dtype).eps)


def test_who_is_who(job) -> None:
    assert (gr.rank(), gr.size()) == (job.rank, job.size)
    assert 0 <= gr.local_rank() < gr.local_size() <= gr.size()
    assert 0 <= gr.cross_rank() < gr.cross_size() <= gr.size()
    assert gr.is_initialized()
    assert len(gr.describe()) > 0
    gr.init()  # does nothing


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce(rank: int, size: int, dtype: np.dtype, op: gr.ReduceOp) -> None:
    if dtype.kind == "b" and op == gr.Average:
        with pytest.raises(gr.InvalidArgument, match="bool"):
            gr.allreduce(np.zeros(3, bool), op)
        return
    for shape in SHAPES:
        mine = values(rank, shape, dtype)
        before = mine.copy()
        result = gr.allreduce(mine, op)
        expected = reference(op, shape, dtype, size)
        limit = tolerance(dtype, op, size)
        assert result.dtype == dtype
        assert result.shape == shape
        error = np.abs(result.astype(np.float64) - expected.astype(np.float64))
        assert (error <= limit).all(), f"{shape}: {result}\nis not\n{expected}"
        assert (mine == before).all()
        result.flat = 0  # a fresh array that can be written


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_grouped_allreduce_of_mixed_dtypes(rank: int, size: int, op: gr.ReduceOp) -> None:
    dtypes = [d for d in DTYPES if d.kind != "b" or op != gr.Average]
    inputs = [values(rank, s, d) for d in dtypes for s in ((3, 2), (), (0,), (65,))]
    results = gr.grouped_allreduce(inputs, op, name=f"mixed.{op.name}")
    assert len(results) == len(inputs)
    for mine, result in zip(inputs, results, strict=True):
        expected = reference(op, mine.shape, mine.dtype, size).astype(np.float64)
        assert result.dtype == mine.dtype
        assert result.shape == mine.shape
        limit = tolerance(mine.dtype, op, size)
        assert (np.abs(result.astype(np.float64) - expected) <= limit).all()
    assert gr.grouped_allreduce([]) == []


def test_many_chunks(rank: int, size: int) -> None:
    count = (3 << 20) + 5  # 12 MiB of float32: more than one chunk and not a multiple
    result = gr.allreduce(np.full(count, rank + 1, np.float32), gr.Sum, name="long")
    assert (result == size * (size + 1) // 2).all()


def test_inputs_of_any_layout(rank: int, size: int) -> None:
    total = size * (size - 1) // 2
    base = np.arange(24, dtype=np.float32).reshape(4, 6) + rank
    expected = size * np.arange(24, dtype=np.float32).reshape(4, 6) + total
    same(gr.allreduce(base.T, gr.Sum), expected.T)
    same(gr.allreduce(base[::-1, ::2], gr.Sum), expected[::-1, ::2])
    same(gr.allreduce(base.astype(">f4"), gr.Sum), expected)
    base.flags.writeable = False
    same(gr.allreduce(base, gr.Sum), expected)
    same(gr.allreduce([1, 2], gr.Sum), np.array([size, 2 * size]))
    assert gr.allreduce(rank, gr.Sum) == total
    assert gr.allreduce(np.float32(0.5)) == np.float32(0.5)


class FakeTensor:
    """What DLPack sees of another framework's tensor."""

    def __init__(self, array: np.ndarray, device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return (self.device, 0)


def test_dlpack(rank: int, size: int) -> None:
    mine = values(rank, (4, 3), np.dtype("float32"))
    expected = reference(gr.Sum, (4, 3), mine.dtype, size)
    same(gr.allreduce(FakeTensor(mine), gr.Sum), expected)
    same(gr.allreduce(FakeTensor(mine.T), gr.Sum), expected.T)
    with pytest.raises(gr.Unsupported, match="device type 2"):
        gr.allreduce(FakeTensor(mine, 2))
    with pytest.raises(gr.InvalidArgument, match="64 bits"):
        gr.allreduce(FakeTensor(np.zeros(3, np.complex64)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allgather(rank: int, size: int, dtype: np.dtype) -> None:
    for rows in (lambda r: 2, lambda r: r, lambda r: (r + 1) % size, lambda r: 0):
        for rest in ((), (3,), (2, 2)):
            parts = [values(r, (rows(r), *rest), dtype) for r in range(size)]
            same(gr.allgather(parts[rank]), np.concatenate(parts))


def test_allgather_of_a_scalar_is_refused() -> None:
    with pytest.raises(gr.InvalidArgument, match=r"'loss'.*scalar"):
        gr.allgather(1.0, name="loss")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast(rank: int, size: int, dtype: np.dtype) -> None:
    for root in range(size):
        for shape in SHAPES:
            result = gr.broadcast(values(rank, shape, dtype), root, name="b")
            same(result, values(root, shape, dtype))


def test_broadcast_from_nobody_is_refused(size: int) -> None:
    for root in (-1, size):
        with pytest.raises(gr.InvalidArgument, match=rf"root_rank={root}.*process set 0"):
            gr.broadcast(np.zeros(2), root)


def test_barrier_and_objects(rank: int, size: int) -> None:
    gr.barrier()
    assert gr.allgather_object({"rank": rank, "x": "y" * rank}) == [
        {"rank": r, "x": "y" * r} for r in range(size)
    ]
    for root in range(size):
        assert gr.broadcast_object(["from", rank], root) == ["from", root]


def test_arguments_are_checked_before_anybody_waits() -> None:
    for bad in (np.zeros(2, complex), np.array(["a"]), np.array([object()]), np.zeros(2, "S2")):
        with pytest.raises(gr.InvalidArgument, match=r"'x'.*dtype"):
            gr.allreduce(bad, name="x")
    with pytest.raises(gr.InvalidArgument, match="op=7"):
        gr.allreduce(np.zeros(2), 7)
    with pytest.raises(gr.Unsupported, match="Adasum"):
        gr.allreduce(np.zeros(2), gr.Adasum)
    with pytest.raises(gr.InvalidArgument, match="wire='half'"):
        gr.allreduce(np.zeros(2), wire="half")


def test_float16_average_does_not_overflow() -> None:
    result = gr.allreduce(np.full(5, 40000, np.float16))
    same(result, np.full(5, 40000, np.float16))


def test_int8_average_does_not_wrap(rank: int) -> None:
    same(gr.allreduce(np.full(5, 100, np.int8)), np.full(5, 100, np.int8))
    same(gr.allreduce(np.full(5, -100, np.int8)), np.full(5, -100, np.int8))
    big = np.full(3, 2**62, np.int64)
    same(gr.allreduce(big), big)


def test_float64_scales_in_full_precision(size: int) -> None:
    x = np.array([1.0, 3.0, 1e-30])
    same(gr.allreduce(x, gr.Sum, prescale_factor=0.1), sum([x * 0.1] * size, np.zeros(3)))
    same(gr.allreduce(x, gr.Max, postscale_factor=0.1), x * 0.1)


def test_wires_lose_what_they_must_and_count_overflow(size: int) -> None:
    before = gr.metrics().saturated
    same(
        gr.allreduce(np.full(3, 1.5, np.float32), gr.Sum, wire="float16"),
        np.full(3, 1.5 * size, np.float32),
    )
    same(
        gr.allreduce(np.full(3, 1.5), gr.Sum, wire="bfloat16"),
        np.full(3, 1.5 * size),
    )
    assert gr.metrics().saturated == before
    large = gr.allreduce(np.full(3, 1e5, np.float32), wire="float16", name="large")
    if np.isinf(large).all():
        assert gr.metrics().saturated == before + 3 * size
    else:
        same(large, np.full(3, 1e5, np.float32))


def test_non_finite_values_reach_all(rank: int, size: int) -> None:
    mine = np.ones(4, np.float32)
    if rank == size - 1:
        mine[2] = np.nan
    before = gr.metrics().non_finite
    result = gr.allreduce(mine, wire="float16", name="nan")
    assert np.isnan(result[2])
    assert (result[[0, 1, 3]] == 1).all()
    assert gr.metrics().non_finite == before + 1


def test_one_name_for_many_shapes_and_operations(rank: int, size: int) -> None:
    for _ in range(3):
        for shape in ((4,), (2, 2), (0,), (9,)):
            mine = values(rank, shape, np.dtype("int32"))
            same(gr.allreduce(mine, gr.Sum, name="n"), reference(gr.Sum, shape, mine.dtype, size))
            same(
                gr.allgather(mine, name="n"),
                np.concatenate([values(r, shape, mine.dtype) for r in range(size)]),
            )
            same(gr.broadcast(mine, 0, name="n"), values(0, shape, mine.dtype))


def test_loops_create_no_new_names(rank: int) -> None:
    gr.allreduce(np.zeros(3))
    unions = gr.metrics().unions
    for _ in range(200):
        gr.allreduce(np.zeros(3))
    # The name of the loop's line is new once.
    assert gr.metrics().unions <= unions + 1


def test_threads_with_names_of_their_own(rank: int, size: int) -> None:
    wrong = []

    def work(number: int) -> None:
        for i in range(20):
            result = gr.allreduce(np.full(5, i + number, np.int64), gr.Sum, name=f"t{number}")
            if not (result == size * (i + number)).all():
                wrong.append((number, i, result))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_metrics_count(size: int) -> None:
    before = gr.metrics()
    gr.grouped_allreduce([np.zeros(10, np.float32), np.zeros(3, np.int8)], name="counted")
    after = gr.metrics()
    assert after.batches == before.batches + 1
    assert after.entries == before.entries + 2
    assert after.bytes == before.bytes + 43
    assert after.last_wait_s >= 0


def test_small_tensors_need_little_memory() -> None:
    gr.grouped_allreduce([np.zeros(1), np.zeros(1)], name="small")
    assert gr.metrics().fusion_buffer_nbytes < 64 << 20
