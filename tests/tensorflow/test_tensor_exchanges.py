"""alltoall, reducescatter and grouped gathers on tensors, eager and in graphs, against NumPy."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import gradred.tensorflow as hvd
import tensorflow as tf
from gradred.errors import Abandoned, InvalidArgument, Mismatch, Unsupported

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.smoke]

DTYPES = [
    *(tf.bool, tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.int8, tf.int16, tf.int32, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
]
MOVED = [*DTYPES, tf.complex64]


def modes(function):
    """The function as it is, and as a tf.function that is run twice."""

    def in_graph(*args):
        traced = tf.function(function, autograph=False)
        traced(*args)
        return traced(*args)

    return {"eager": function, "graph": in_graph}


BOTH = pytest.mark.parametrize("mode", ["eager", "graph"])


def rows_of(rank, count, dtype, rest=(2,)):
    """Small integers that depend on rank and place."""
    shape = (count, *rest)
    numbers = (np.arange(int(np.prod(shape))) + 2 * rank) % 4
    return tf.cast(tf.reshape(tf.constant(numbers), shape), dtype)


def equal(result, expected):
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert bool(tf.reduce_all(result == expected)), f"{result}\nis not\n{expected}"


def works(size):
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == size


@BOTH
@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: d.name)
def test_alltoall(mode, dtype, rank, size):
    for rows in (lambda a, b: a + 2 * b, lambda a, b: 3 * (b == size - 1), lambda a, b: 0):
        table = np.array([[rows(a, b) for b in range(size)] for a in range(size)])
        inputs = [rows_of(a, table[a].sum(), dtype) for a in range(size)]
        ends = np.cumsum(table, 1)
        parts = [inputs[a][ends[a][rank] - table[a][rank] : ends[a][rank]] for a in range(size)]
        for splits_dtype in (tf.int32, tf.int64):
            splits = tf.constant(table[rank], splits_dtype)
            result, received = modes(hvd.alltoall)[mode](inputs[rank], splits)
            equal(result, tf.concat(parts, 0))
            assert received.dtype == splits_dtype
            np.testing.assert_array_equal(received, table[:, rank])


@BOTH
def test_alltoall_of_equal_parts(mode, rank, size):
    for rows in (0, 2):
        inputs = [rows_of(a, rows * size, tf.float32) for a in range(size)]
        result = modes(hvd.alltoall)[mode](inputs[rank])
        equal(result, tf.concat([tf.split(x, size)[rank] for x in inputs], 0))
    result, received = modes(lambda x: hvd.alltoall(x, [rows] * size))[mode](inputs[rank])
    equal(received, tf.constant([rows] * size, tf.int32))


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_reducescatter(mode, dtype, rank, size):
    for count in (0, 1, size, 2 * size + 1):
        xs = [rows_of(r, count, dtype) for r in range(size)]
        everyone = np.stack([tf.cast(x, tf.float64).numpy() for x in xs])
        is_bool = dtype == tf.bool
        for op, whole in (
            (hvd.Sum, everyone.any(0) if is_bool else everyone.sum(0)),
            (hvd.Min, everyone.min(0)),
            (hvd.Max, everyone.max(0)),
            (hvd.Product, everyone.prod(0)),
        ):
            result = modes(lambda x, op=op: hvd.reducescatter(x, op=op))[mode](xs[rank])
            assert result.dtype == dtype
            expected = np.array_split(np.asarray(whole, np.float64), size)[rank]
            np.testing.assert_array_equal(tf.cast(result, tf.float64), expected)


@BOTH
def test_reducescatter_options(mode, rank, size):
    x = tf.constant([[6.0], [12.0], [18.0]], tf.float64)
    parts = np.array_split(x.numpy(), size)
    run = lambda **options: modes(lambda x: hvd.reducescatter(x, **options))[mode](x)  # noqa: E731
    np.testing.assert_array_equal(run(), parts[rank])  # an average
    scaled = run(op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_array_equal(scaled, parts[rank] * 2 * size)
    x = tf.constant([1e5, 1.0, 1.0])
    halves = run(op=hvd.Sum, compression=hvd.Compression.fp16)
    np.testing.assert_array_equal(halves, np.array_split([np.inf, size, size], size)[rank])


@BOTH
def test_groups(mode, rank, size):
    xs = [
        rows_of(rank, rank + 1, tf.float32),
        rows_of(rank, rank, tf.uint16, ()),
        rows_of(rank, 0, tf.bool, (3,)),
    ]
    results = modes(lambda *xs: hvd.grouped_allgather(xs))[mode](*xs)
    equal(results[0], tf.concat([rows_of(r, r + 1, tf.float32) for r in range(size)], 0))
    equal(results[1], tf.concat([rows_of(r, r, tf.uint16, ()) for r in range(size)], 0))
    equal(results[2], tf.zeros([0, 3], tf.bool))
    xs = [rows_of(rank, 5, tf.float32), rows_of(rank, 2, tf.int8, ()), tf.zeros([0, 2])]
    results = modes(lambda *xs: hvd.grouped_reducescatter(xs, op=hvd.Sum))[mode](*xs)
    for result, x, rest in zip(results, xs, ((2,), (), (2,)), strict=True):
        whole = sum(rows_of(r, x.shape[0], tf.int64, rest).numpy() for r in range(size))
        assert result.dtype == x.dtype
        np.testing.assert_array_equal(result, np.array_split(whole, size)[rank])
    assert hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []


def test_static_shapes(rank, size):
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([size * 2 + 1, 3])])
    def step(x, y):
        rows, received = hvd.alltoall(x, tf.fill([size], tf.shape(x)[0] // size))
        return rows, received, hvd.alltoall(x), hvd.reducescatter(x), hvd.reducescatter(y)

    shapes = step.get_concrete_function().output_shapes
    mine = 2 + (rank == 0)
    assert [s.as_list() for s in shapes] == [[None, 2], [size], [None, 2], [None, 2], [mine, 3]]
    for n in (1, 0, 3):
        results = step(tf.ones([n * size, 2]), tf.ones([size * 2 + 1, 3]))
        assert [r.shape[0] for r in results] == [n * size, size, n * size, n, mine]


def test_loops_and_unused_results(rank, size):
    """Each runs once an iteration, whether somebody needs the result or not."""

    @tf.function
    def loop(x):
        total = tf.zeros([1])
        for i in tf.range(20):
            k = tf.cast(i, tf.float32)
            hvd.alltoall(x + k)
            total += hvd.reducescatter(x + k, op=hvd.Sum)[:1]
            hvd.grouped_allgather([x, x])
        return total

    x = tf.range(size, dtype=tf.float32)
    for _ in range(2):
        np.testing.assert_array_equal(loop(x), [size * (20 * rank + 190)])


def test_sessions(rank, size):
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 2])
        splits = v1.placeholder(tf.int64, [size])
        fetched = [*hvd.alltoall(x, splits), hvd.reducescatter(x, op=hvd.Sum)]
        with v1.Session(graph=graph) as session:
            for n in (1, 2):
                value = np.full([n * size, 2], rank + 1.0)
                rows, received, mine = session.run(fetched, {x: value, splits: [n] * size})
                expected = np.repeat(np.arange(size) + 1.0, n)[:, None] * np.ones(2)
                np.testing.assert_array_equal(rows, expected)
                np.testing.assert_array_equal(received, [n] * size)
                np.testing.assert_array_equal(mine, np.full((n, 2), size * (size + 1) / 2))


@pytest.fixture
def pair():
    process_set = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    yield process_set
    hvd.remove_process_set(process_set)


@BOTH
@pytest.mark.ranks(3)
def test_process_sets(mode, rank, pair):
    x = tf.range(4.0)
    if rank == 1:
        for call in (hvd.alltoall, hvd.reducescatter):
            with pytest.raises(InvalidArgument, match="rank 1 is no member"):
                call(x, process_set=pair)
        return
    place = pair.rank()
    rows, received = modes(lambda x: hvd.alltoall(x, [1, 3], process_set=pair))[mode](x)
    np.testing.assert_array_equal(rows, [0.0, 0.0] if place == 0 else [1, 2, 3, 1, 2, 3])
    np.testing.assert_array_equal(received, [1, 1] if place == 0 else [3, 3])
    mine = modes(lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=pair))[mode](x[:3])
    np.testing.assert_array_equal(mine, [0, 2] if place == 0 else [4])


# ---- errors

RUN_TIME = (InvalidArgument, tf.errors.InvalidArgumentError)


@BOTH
def test_splits_that_do_not_fit(mode, rank, size):
    x = tf.zeros([4, 2])
    for wrong in ([5, *[0] * (size - 1)], [-1] * size, [0] * size + [4], [], [2**62] * (4 * size)):
        splits = tf.constant(wrong, tf.int64)
        run = modes(lambda x, s: hvd.alltoall(x, s, name="unfit"))[mode]
        with pytest.raises(RUN_TIME) as caught:
            run(x, splits)
        text = str(caught.value)
        assert "unfit" in text and f"rank {rank} in process set 0" in text
        assert f"{size} numbers of rows from 0 with the sum 4, got [" in text
        works(size)
    with pytest.raises(RUN_TIME, match=r"got \[\]"):
        hvd.alltoall(x, [], name="unfit")


@BOTH
@pytest.mark.ranks(2, 3)
def test_splits_that_do_not_fit_on_one_rank(mode, rank, size):
    run = modes(lambda x, s: hvd.alltoall(x, s, name="one"))[mode]
    kinds = RUN_TIME if rank == 1 else (Abandoned, tf.errors.AbortedError)
    with pytest.raises(kinds, match=r"with the sum \d, got \[2, 1"):
        run(tf.zeros([size]), tf.constant([2 if rank == 1 else 1, *[1] * (size - 1)]))
    works(size)
    rows, _ = run(tf.range(size), tf.ones([size], tf.int32))
    np.testing.assert_array_equal(rows, [rank] * size)


@BOTH
@pytest.mark.ranks(2)
def test_an_interrupt_is_one_where_another_rank_ends_the_operation(mode, rank, size, shared_dir):
    """A Ctrl-C that reaches all ranks: some are in Python, and give up what others need."""
    sent = shared_dir / mode
    run = modes(lambda x, s: hvd.alltoall(x, s, name="interrupted"))[mode]
    if rank == 1:

        def interrupt() -> None:
            """When the main thread waits: its Python stands still, and so has entered the op."""
            place, still = None, 0
            while still < 30:
                frame = sys._current_frames()[threading.main_thread().ident]
                here = (id(frame), frame.f_code, frame.f_lasti)
                place, still = here, still + 1 if here == place else 0
                del frame
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            sent.touch()

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            run(tf.zeros([size]), tf.ones([size], tf.int32))
            time.sleep(10)
    else:
        while not sent.exists():
            time.sleep(0.01)
        with pytest.raises(RUN_TIME):
            run(tf.zeros([size]), tf.zeros([size], tf.int32))
    works(size)


@BOTH
def test_arguments_are_checked_before_anybody_waits(mode, rank, size):
    x = tf.zeros([size])
    bad = (tf.ones([size]), tf.ones([1, size], tf.int32), 3, tf.ones([size], tf.int16))
    for splits in bad:
        with pytest.raises(InvalidArgument, match=f"rank {rank} in process set 0.*expected.*got"):
            modes(lambda x, s=splits: hvd.alltoall(x, s))[mode](x)
    for call in (hvd.alltoall, hvd.allgather, hvd.reducescatter):
        with pytest.raises(InvalidArgument, match=r"'.*loss'.*scalar"):
            modes(lambda x, call=call: call(x, name="loss"))[mode](tf.constant(1.0))
        with pytest.raises(InvalidArgument, match="dtype string: expected one of bool"):
            call(tf.constant(["a"]))
    for call in (hvd.reducescatter, hvd.allreduce):
        with pytest.raises(InvalidArgument, match="dtype complex64: expected one of bool"):
            call(tf.zeros([2], tf.complex64))
    with pytest.raises(Unsupported, match="Adasum"):
        hvd.reducescatter(x, op=hvd.Adasum)


@BOTH
@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree(mode, rank, size):
    odd = rank == 1
    calls = {
        "columns": lambda: hvd.alltoall(tf.zeros([size, 3 if odd else 2]), name="columns"),
        "rows": lambda: hvd.reducescatter(tf.zeros([3 if odd else 4, 2]), name="rows"),
        "op": lambda: hvd.reducescatter(tf.zeros([4]), op=hvd.Max if odd else hvd.Min, name="op"),
        "group": lambda: hvd.grouped_allgather([tf.zeros([2, 2 + odd]), tf.zeros(1)], name="group"),
    }
    for name, call in calls.items():
        with pytest.raises((Mismatch, tf.errors.FailedPreconditionError), match=name):
            modes(call)[mode]()
        works(size)
