"""Names of reductions in graphs: alike on all ranks, whatever each has traced or run before."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

import gradred.tensorflow as hvd
import tensorflow as tf

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.smoke]

SCALAR = tf.TensorSpec([], tf.float32)


def total(size):
    return size * (size + 1) / 2


def reduction(name=None, **attributes):
    """A function that reduces; one for each call, as ranks may trace it at different times."""
    options = {"experimental_attributes": attributes} if attributes else {}
    return tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name=name), **options)


def late(x, is_late):
    """x, on some ranks later than what else a graph computes."""
    if not is_late:
        return x
    return tf.ensure_shape(
        tf.py_function(lambda v: (time.sleep(0.02), v)[1], [x], tf.float32), x.shape
    )


def test_functions_called_twice_in_one_graph(size):
    inner = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    outer = tf.function(lambda x: inner(x) + inner(x + 1.0))
    for _ in range(3):
        assert float(outer(tf.constant(1.0))) == 3.0 * size


def test_ranks_that_trace_differently(rank, size):
    """Names in graphs do not depend on what one rank alone has traced, also in vain."""

    def layer(factor):
        return tf.function(lambda x: hvd.allreduce(x * factor, op=hvd.Sum))

    layers = [layer(factor) for factor in (1.0, 2.0, 3.0)]
    fails = [rank == size - 1]
    if rank == 0:
        layers[1].get_concrete_function(tf.TensorSpec([], tf.float32))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = []
            for i, function in enumerate(layers):
                with tf.name_scope(f"layer_{9 + rank + i}"):  # as Keras does: "9", "10", "11"
                    y += [function(x), function(10.0 * x)]
                    y.append(tf.cond(x > 0, lambda f=function: f(20.0 * x), lambda: 0.0))
            loss = tf.add_n([2.0**i * z for i, z in enumerate(y)])
        if fails[0]:
            raise RuntimeError
        return y, tape.gradient(loss, x)

    with contextlib.suppress(RuntimeError):
        step.get_concrete_function(tf.TensorSpec([], tf.float32))
    fails[0] = False
    total = size * (size + 1) / 2
    scales = [factor * k for factor in (1.0, 2.0, 3.0) for k in (1.0, 10.0, 20.0)]
    for _ in range(2):
        y, gradient = step(tf.constant(rank + 1.0))
        assert [float(z) for z in y] == [s * total for s in scales]
        assert float(gradient) == size * sum(2.0**i * s for i, s in enumerate(scales))
    for name in ("layer_9", f"of_rank_{rank}"):  # for one rank a path that it knows

        @tf.function
        def again(x, name=name):
            with tf.name_scope(name):
                return layers[0](x)

        assert float(again(tf.constant(rank + 1.0))) == total


@pytest.mark.parametrize("traced", ["before", "after"])
def test_a_graph_of_one_rank_that_leaves_its_reductions_out(traced, rank, size):
    """One rank alone runs graphs with reductions in branches that are not taken, then all run one
    in which reductions of these names stand in branches as well."""
    name = f"left out {traced}"
    layer = reduction(name)

    def alone(x):
        direct = tf.cond(x > 0, lambda: hvd.allreduce(x, name=name), lambda: x)
        called = tf.cond(x > 1, lambda: layer(x), lambda: x)
        looped = tf.while_loop(lambda i, s: i < x, lambda i, s: (i + 1, layer(s)), (0.0, x))
        return direct + called + looped[1]

    def common(x):
        with tf.name_scope("z"):
            taken = tf.cond(x > 0, lambda: layer(10.0 * x), lambda: x)
        return taken, layer(x), hvd.allreduce(100.0 * x, op=hvd.Sum, name=name)

    common = tf.function(common)
    if traced == "before":
        common.get_concrete_function(SCALAR)
    if rank == 0:
        run = tf.function(alone)
        for x in (-1.0, -2.0):
            assert float(run(tf.constant(x))) == 3 * x
    for _ in range(2):
        results = common(tf.constant(rank + 1.0))
        assert [float(y) for y in results] == [f * total(size) for f in (10.0, 1.0, 100.0)]


def test_sparse_gradients_after_a_graph_of_one_rank(rank, size):
    """Rows or the whole are reduced in branches, of which a graph runs one."""
    table = tf.Variable(tf.zeros([6, 1]))

    @tf.function
    def step(rows, scale):
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) * scale
        return tape.gradient(loss, table)

    @tf.function
    def alone(rows):
        return tf.cond(
            tf.size(rows) > 9, lambda: tf.convert_to_tensor(step(rows, 1.0)), lambda: table
        )

    if rank == size - 1:
        alone(tf.constant([1, 2]))
    for rows in ([1], [0, 1, 2, 3, 4, 5], [5]):  # few, and more than the whole
        gradient = tf.convert_to_tensor(step(tf.constant(rows), tf.constant(rank + 1.0)))
        expected = [total(size) if row in rows else 0.0 for row in range(6)]
        assert gradient.numpy()[:, 0].tolist() == expected


def test_functions_on_several_devices(rank, size):
    """Copies on devices of their own, in whatever order the ranks come to them."""
    assert len(tf.config.list_logical_devices("CPU")) > 1  # see conftest.py
    layer = reduction()

    @tf.function
    def step(x):
        results = []
        for i in range(4):
            with tf.device(f"CPU:{i % 2}"):
                y = late(x + i, (rank + i) % 2)
                results.append(layer(y))
                results.append(tf.cond(x > 0, lambda y=y: layer(10.0 * y), lambda: 0.0))
                results.append(hvd.allgather(tf.reshape(y, [1]), name=f"devices.{i}")[-1])
        with tf.device("CPU:1"):
            loop = lambda i, s: (i + 1, s + layer(x))  # noqa: E731
            results.append(tf.while_loop(lambda i, s: i < 3, loop, (0, 0.0))[1])
        return results

    expected = []
    for i in range(4):
        of_all = total(size) + i * size
        expected += [of_all, 10.0 * of_all, size + i]
    for _ in range(3):
        results = step(tf.constant(rank + 1.0))
        assert [float(y) for y in results] == [*expected, 3 * total(size)]


def test_gradients_on_several_devices(rank, size):
    v, w = tf.Variable(1.0), tf.Variable([1.0, 1.0])

    @tf.function
    def gradients(scale):
        with tf.GradientTape() as tape:
            with tf.device("CPU:1"):
                loss = v * scale
            loss += tf.reduce_sum(w) * scale
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [v, w])

    @tf.function
    def step(x):
        with tf.device("CPU:1"):
            first = gradients(late(x, rank == 0))
        return first, gradients(10.0 * late(x, rank == 1))

    for _ in range(3):
        for factor, (of_v, of_w) in zip((1, 10), step(tf.constant(rank + 1.0)), strict=True):
            assert float(of_v) == factor * total(size)
            assert of_w.numpy().tolist() == [factor * total(size)] * 2


def test_functions_that_are_not_inlined(rank, size):
    """Calls of one body with one name: TensorFlow runs them one after the other."""
    apart, inlined = reduction("apart", _noinline=True), reduction("apart")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = []
            for i in range(3):
                y = late(x * 10.0**i, (rank + i) % 2)
                results += [apart(y), inlined(2.0 * y)]
                results.append(tf.cond(x > 0, lambda y=y: apart(y), lambda: 0.0))
            loss = tf.add_n(results)
        return results, tape.gradient(loss, x)

    for _ in range(3):
        results, gradient = step(tf.constant(rank + 1.0))
        expected = [10.0**i * f * total(size) for i in range(3) for f in (1.0, 2.0, 1.0)]
        assert [float(y) for y in results] == expected
        assert float(gradient) == 444.0 * size


def test_one_function_in_several_threads(rank, size):
    """One after the other; and threads that make kernels at the same time."""
    shared = reduction("in threads")
    results = {}

    def work(i):
        own = reduction(f"of thread {i}")
        step = tf.function(lambda x: own(x) + 10.0 * own(2.0 * x))
        if i == rank:
            tf.cond(tf.constant(False), lambda: 0.0, lambda: 0.0)
            tf.function(lambda x: tf.cond(x > 9, lambda: own(x), lambda: x))(tf.constant(1.0))
        results[i] = [float(step(tf.constant(rank + 1.0))) for _ in range(3)]

    def at_once(count, target):
        threads = [threading.Thread(target=target, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    at_once(4, work)
    assert results == {i: [21.0 * total(size)] * 3 for i in range(4)}
    for i in range(3):
        at_once(1, lambda _, i=i: results.update({i: float(shared(tf.constant(rank + i + 0.0)))}))
        assert results[i] == total(size) + (i - 1) * size
