"""Gradients that are tf.IndexedSlices."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.tensorflow as hvd
import tensorflow as tf

pytestmark = pytest.mark.ranks(2)

BOTH = pytest.mark.parametrize("mode", ["eager", "graph"])
ROWS, WIDTH = 64, 2


def traced(function, mode):
    return tf.function(function, autograph=False) if mode == "graph" else function


def reduce_slices(rows_of_rank, mode, dtype=tf.float32, values=None, index=np.int32, **options):
    """The reduced gradient of a table of which a rank looks rows up; bytes that came."""
    table = tf.Variable(tf.ones([ROWS, WIDTH], dtype))

    def step(rows, weights):
        with tf.GradientTape() as tape:
            looked_up = tf.gather(table, rows) * weights[:, tf.newaxis]
            loss = tf.reduce_sum(looked_up)
        [gradient] = hvd.DistributedGradientTape(tape, **options).gradient(loss, [table])
        assert isinstance(gradient, tf.IndexedSlices)
        return gradient

    rows = np.array(rows_of_rank, index)
    weights = np.ones(len(rows)) if values is None else np.array(values)
    run = traced(step, mode)
    before = gradred.metrics().bytes
    gradient = run(tf.constant(rows), tf.constant(weights, dtype))
    return gradient, gradred.metrics().bytes - before


def dense(rows_of_ranks, divisor=1):
    total = np.zeros((ROWS, WIDTH))
    for rows in rows_of_ranks:
        np.add.at(total, np.array(rows, int), 1.0)
    return total / divisor


CASES = {
    "one row many times": lambda r: [3] * 50,
    "own rows": lambda r: [r, r + 10, r],
    "shared rows": lambda r: [5, 6, r],
    "nothing": lambda r: [],
    "nothing on some": lambda r: [] if r == 0 else [1, 1],
    "all rows": lambda r: list(range(ROWS)),
}


@pytest.mark.ranks(1, 2, 3)
@BOTH
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("case", list(CASES))
def test_rows_are_summed(case, op, mode, rank, size):
    """P5: each row once, whether rows were gathered or the whole reduced."""
    gradient, _ = reduce_slices(CASES[case](rank), mode, op=op)
    everyone = [CASES[case](r) for r in range(size)]
    indices = gradient.indices.numpy()
    assert sorted(indices) == sorted({i for rows in everyone for i in rows})
    expected = dense(everyone, size if op is hvd.Average else 1)
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-6)


@BOTH
@pytest.mark.ranks(2, 3)
def test_what_moves_less_is_chosen_alike(mode, rank, size):
    """P5: a row that is there many times travels once; nearly all rows travel as the whole."""
    counts = 4 * 8
    for mine in (1, 2 + rank, 40):
        _, nbytes = reduce_slices([i for i in range(mine) for _ in range(5)], mode)
        everyone = {1: size, 2 + rank: sum(2 + r for r in range(size)), 40: 40 * size}[mine]
        if everyone * (WIDTH * 4 + 8) < ROWS * (WIDTH * 4 + 1):
            assert nbytes <= counts + everyone * (WIDTH * 4 + 4)
        else:
            assert nbytes == counts + ROWS * (WIDTH * 4 + 1)


@BOTH
def test_ranks_with_indices_of_two_dtypes(mode, rank):
    """Near the limit too all choose alike: the whole has no indices, rows are a Mismatch."""
    index = np.int64 if rank == 1 else np.int32
    mine = range(20)  # 40 rows of 12 or 16 bytes against the whole of 576
    gradient, _ = reduce_slices(mine, mode, index=index, op=hvd.Sum)
    assert gradient.indices.dtype == index
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient), dense([mine] * 2))
    errors = (gradred.Mismatch, tf.errors.FailedPreconditionError)
    with pytest.raises(errors, match=r"int32.*int64"):
        reduce_slices([5], mode, index=index)


@BOTH
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_compression(wire, mode, rank, size):
    compression = getattr(hvd.Compression, wire)
    full = reduce_slices([rank, 7], mode, op=hvd.Sum)[1]
    gradient, nbytes = reduce_slices([rank, 7], mode, op=hvd.Sum, compression=compression)
    assert gradient.values.dtype == tf.float32
    assert nbytes < full
    np.testing.assert_array_equal(
        tf.convert_to_tensor(gradient), dense([[r, 7] for r in range(size)])
    )


@BOTH
@pytest.mark.ranks(2, 3)
def test_overflow_on_the_wire_is_counted(mode, rank, size):
    """S7: infinite on all ranks alike, and in the metrics."""
    before = gradred.metrics().saturated
    value = 1e6 if rank == 1 else 1.0
    gradient, _ = reduce_slices(
        [4], mode, values=[value], op=hvd.Sum, compression=hvd.Compression.fp16
    )
    np.testing.assert_array_equal(gradient.values, [[np.inf] * WIDTH])
    assert gradred.metrics().saturated - before == WIDTH


@BOTH
def test_as_dense(mode, rank, size):
    table = tf.Variable(tf.ones([ROWS, WIDTH]))

    def step(op):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, rank, 9]))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True, op=op)
        return tape.gradient(loss, [table])[0]

    everyone = [dense([[r, r, 9]]) for r in range(size)]
    for op, reduction in ((hvd.Sum, sum), (hvd.Max, lambda a: np.max(a, 0))):
        gradient = traced(lambda op=op: step(op), mode)()
        assert isinstance(gradient, tf.Tensor)
        np.testing.assert_array_equal(gradient, reduction(everyone))


@BOTH
def test_an_extremum_of_rows_is_refused(mode):
    table = tf.Variable(tf.ones([ROWS, WIDTH]))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1]))
        return hvd.DistributedGradientTape(tape, op=hvd.Max).gradient(loss, [table])

    with pytest.raises(gradred.Unsupported, match="sparse_as_dense=True"):
        traced(step, mode)()


@BOTH
@pytest.mark.ranks(2, 3)
def test_a_table_that_some_ranks_do_not_use_in_some_steps(mode, rank, size):
    """H21: after a step in which all ranks had it."""
    table, w = tf.Variable(tf.ones([ROWS, WIDTH])), tf.Variable(1.0)

    def step(uses):
        with tf.GradientTape() as tape:
            loss = w * 2.0
            if uses:
                loss += tf.reduce_sum(tf.gather(table, [rank]))
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        return tape.gradient(loss, [table, w])

    run = traced(step, mode)
    run(True)
    for i in range(4):
        users = [r for r in range(size) if (r + i) % 3 == 0]
        of_table, of_w = run(rank in users)
        assert float(of_w) == 2.0 * size
        if of_table is None:
            assert not users and mode == "eager"
            continue
        of_table = tf.convert_to_tensor(of_table)
        np.testing.assert_array_equal(of_table, dense([[r] for r in users]))


def test_no_rows_on_some_and_none_on_others(rank, size):
    """H21: all ranks decide alike whether rows are exchanged."""
    table = tf.Variable(tf.ones([ROWS, WIDTH]))
    empty = []
    for uses in (True, rank == 0, False):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, tf.zeros([0], tf.int32))
            loss = tf.reduce_sum(rows) if uses else tf.constant(0.0)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        [gradient] = tape.gradient(loss, [table])
        empty.append(gradient is not None and len(gradient.indices) == 0)
    assert empty == [True, True, False] and gradient is None


@pytest.mark.ranks(2, 3)
def test_a_rank_that_has_joined(rank, size):
    """What it would have to gather is reduced as a whole."""
    table = tf.Variable(tf.ones([ROWS, WIDTH]))
    for _ in range(1 if rank == 1 else 3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, 8]))
        [gradient] = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [table])
    assert hvd.join() != 1
    if rank != 1:
        np.testing.assert_array_equal(
            tf.convert_to_tensor(gradient), dense([[r, 8] for r in range(size) if r != 1])
        )


@BOTH
@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product])
def test_other_reductions_of_dense_gradients(op, mode, rank, size):
    v, w = tf.Variable([1.0, 1.0]), tf.Variable(1.0)
    factors = tf.constant([rank + 1.0, 3.0 - rank])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * factors) + 2.0 * w
        return hvd.DistributedGradientTape(tape, op=op, groups=1).gradient(loss, [v, w])

    everyone = np.array([[r + 1.0, 3.0 - r] for r in range(size)])
    reduction = {hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}[op]
    of_v, of_w = traced(step, mode)()
    np.testing.assert_array_equal(of_v, reduction(everyone, 0))
    assert float(of_w) == (2.0**size if op is hvd.Product else 2.0)
