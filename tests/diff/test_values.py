"""What operations return, against NumPy and, where the job has it, mpi4py."""

from __future__ import annotations

import numpy as np
import pytest

import tensorflow as tf
from diff.cases import unequal_parts
from gradred import diff

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.smoke]

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8")


def data(rank, rows=4):
    """Small whole numbers: sums are exact in all dtypes."""
    return np.random.default_rng(rank).integers(0, 5, (rows, 3))


def expected_of(rank, size):
    everyone = [data(r) for r in range(size)]
    whole = np.concatenate(everyone)
    parts = [unequal_parts(r, size, 4) for r in range(size)]
    starts = [np.cumsum([0, *p]) for p in parts]
    zeros = np.zeros((4, 3), int)
    return {
        "sum": sum(everyone),
        "min": np.min(everyone, 0),
        "max": np.max(everyone, 0),
        "product": np.prod(everyone, 0),
        "psum": sum(everyone),
        "replicate": everyone[rank],
        "broadcast": everyone[-1],
        "reduce": sum(everyone) if rank == size - 1 else zeros,
        "allgather": np.concatenate([x[: r + 1] for r, x in enumerate(everyone)]),
        "reduce_scatter": sum(everyone)[starts[0][rank] : starts[0][rank + 1]],
        "gather": whole if rank == 0 else zeros[:0],
        "scatter": everyone[0][starts[0][rank] : starts[0][rank + 1]],
        "alltoall": np.concatenate(
            [everyone[r][starts[r][rank] : starts[r][rank + 1]] for r in range(size)]
        ),
        "scan": sum(everyone[: rank + 1]),
        "shift": everyone[rank - 1] if rank else zeros,
        "repartition": np.concatenate(everyone)[:, 3 * rank // size : 3 * (rank + 1) // size],
    }


def results_of(x, context):
    rank, size = context.rank, context.size
    mine = unequal_parts(0, size, 4)[rank]
    rows = [[(4 * r, 4 * r + 4), (0, 3)] for r in range(size)]
    columns = [[(0, 4 * size), (3 * r // size, 3 * (r + 1) // size)] for r in range(size)]
    return {
        **{op: diff.allreduce(x, context, op) for op in ("sum", "min", "max", "product")},
        "psum": diff.psum(x, context),
        "replicate": diff.replicate(x, context),
        "broadcast": diff.broadcast(x, context, size - 1),
        "reduce": diff.reduce(x, context, size - 1),
        "allgather": diff.allgather(x[: rank + 1], context),
        "reduce_scatter": diff.reduce_scatter(x, context, mine),
        "gather": diff.gather(x, context),
        "scatter": diff.scatter(x, context, 0, mine),
        "alltoall": diff.alltoall(x, context, unequal_parts(rank, size, 4))[0],
        "scan": diff.scan(x, context),
        "shift": diff.shift(x, context),
        "repartition": diff.repartition(x, context, rows, columns),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype, context, rank, size):
    x = tf.cast(tf.constant(data(rank)), dtype)
    expected = expected_of(rank, size)
    runs = [lambda x: results_of(x, context)]
    if dtype in ("bfloat16", "float64"):
        runs.append(tf.function(runs[0]))
    for run in runs:
        results = run(x)
        for name, result in results.items():
            assert result.dtype == x.dtype, name
            got = tf.cast(result, tf.float64).numpy()
            np.testing.assert_array_equal(got, expected[name], err_msg=name)


def test_like_mpi4py(context, rank, size):
    mpi = pytest.importorskip("mpi4py.MPI")
    world = mpi.COMM_WORLD
    if world.size != size:
        pytest.skip("the job was not started by MPI")
    x = np.random.default_rng(rank).normal(size=(size, 5))

    def same(ours, call, shape=x.shape, rtol=0.0):
        theirs = np.zeros(shape)
        call(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=rtol)

    rounding = 8 * size * np.finfo(float).eps  # the order of sums may differ
    t = tf.constant(x)
    for name, op in (("sum", mpi.SUM), ("min", mpi.MIN), ("max", mpi.MAX), ("product", mpi.PROD)):
        same(
            diff.allreduce(t, context, name),
            lambda y, op=op: world.Allreduce(x, y, op),
            rtol=rounding if name in ("sum", "product") else 0.0,
        )
    same(diff.scan(t, context), lambda y: world.Scan(x, y), rtol=rounding)
    same(diff.alltoall(t, context)[0], lambda y: world.Alltoall(x, y))
    same(diff.allgather(t, context), lambda y: world.Allgather(x, y), (size * size, 5))
    same(
        diff.reduce_scatter(t, context),
        lambda y: world.Reduce_scatter_block(x, y),
        (1, 5),
        rtol=rounding,
    )
    last = size - 1
    same(diff.broadcast(t, context, last), lambda y: world.Bcast(np.copyto(y, x) or y, last))
    same(
        diff.allreduce(t, context, "mean"),
        lambda y: (world.Allreduce(x, y), np.divide(y, size, y)),
        rtol=rounding,
    )
    zeros = x.shape if rank == last else (0, 5)
    reduced = diff.reduce(t, context, last)[: zeros[0]]
    same(
        reduced, lambda y: world.Reduce(x, y if rank == last else None, root=last), zeros, rounding
    )
    # Unequal parts: rank r has, or gets, r + 1 rows.
    rows = np.arange(1, size + 1)
    total = int(rows.sum())
    ours, whole = x[:1].repeat(rank + 1, 0), np.random.default_rng(0).normal(size=(total, 5))
    counts = 5 * rows
    part = tf.constant(ours)
    same(
        diff.allgather(part, context),
        lambda y: world.Allgatherv(ours, (y, counts)),
        (total, 5),
    )
    same(
        diff.gather(part, context, last),
        lambda y: world.Gatherv(ours, (y, counts) if rank == last else None, root=last),
        (total if rank == last else 0, 5),
    )
    same(
        diff.scatter(tf.constant(whole), context, last, rank + 1),
        lambda y: world.Scatterv((whole, counts) if rank == last else None, y, root=last),
        ours.shape,
    )
    same(
        diff.reduce_scatter(tf.constant(whole), context, rank + 1),
        lambda y: world.Reduce_scatter(whole, y, counts),
        ours.shape,
        rounding,
    )
    # Every rank sends r + 1 rows to rank r.
    same(
        diff.alltoall(tf.constant(whole), context, rows)[0],
        lambda y: world.Alltoallv((whole, counts), (y, np.full(size, 5 * (rank + 1)))),
        (size * (rank + 1), 5),
    )
    same(
        diff.sendrecv(t, context, (rank + 1) % size, (rank - 1) % size),
        lambda y: world.Sendrecv(x, (rank + 1) % size, 0, y, (rank - 1) % size, 0),
    )


def test_means(context, rank, size):
    """A mean of halves does not overflow on its way."""
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        x = tf.fill([5], tf.constant(60000.0 if rank else 30000.0, dtype))
        mean = diff.allreduce(x, context, "mean")
        expected = (30000.0 + 60000.0 * (size - 1)) / size
        tolerance = {2: 2**-7, 4: 2**-22, 8: 2**-50}[dtype.size]
        np.testing.assert_allclose(tf.cast(mean, tf.float64), expected, rtol=tolerance)


def test_large_and_empty(context, rank, size):
    for count in (0, 1, 300_001):
        x = tf.cast(tf.range(count), tf.float32) + rank
        total = diff.allreduce(x, context)
        np.testing.assert_array_equal(
            total, size * np.arange(count, dtype=np.float32) + size * (size - 1) // 2
        )
        ring = diff.sendrecv(x, context, (rank + 1) % size, (rank - 1) % size)
        np.testing.assert_array_equal(ring, np.arange(count) + (rank - 1) % size)
        parts = diff.allgather(x[:, tf.newaxis], context)
        assert parts.shape == (count * size, 1)
