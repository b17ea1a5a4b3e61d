"""DistributedGradientTape, missing gradients, and steps that fail on one rank."""

from __future__ import annotations

import time

import numpy as np
import pytest

import gradred
import gradred.tensorflow as hvd
import tensorflow as tf
from gradred.errors import Abandoned, InvalidArgument

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.smoke]

BOTH = pytest.mark.parametrize("mode", ["eager", "graph"])
MANY = pytest.mark.ranks(2, 3)


def traced(function, mode):
    return tf.function(function) if mode == "graph" else function


@BOTH
@pytest.mark.parametrize("wrap", ["before", "after"])
def test_gradients_are_averaged(mode, wrap, rank, size):
    w, b = tf.Variable([1.0, 2.0]), tf.Variable(0.5)

    def step(x):
        if wrap == "before":
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(w * x) + 3.0 * b
        else:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(w * x) + 3.0 * b
            tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, {"w": w, "b": [b]})

    step = traced(step, mode)
    for _ in range(3):
        gradients = step(tf.constant([1.0, 2.0]) + rank)
    np.testing.assert_allclose(gradients["w"], np.float32([1, 2]) + (size - 1) / 2)
    np.testing.assert_array_equal(gradients["b"][0], 3.0)


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 4.0},
        {"compression": hvd.Compression.fp16},
        {"groups": 2},
        {"groups": "layer"},
        {"groups": "8B"},
        {"num_groups": 100},
    ],
    ids=str,
)
def test_options(mode, options, rank, size):
    ws = [tf.Variable([float(i)], name="same/name") for i in range(5)]

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * (rank + 1.0) * (i + 1)) for i, w in enumerate(ws)])
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, ws)

    factor = size if options.get("op") is hvd.Sum else 1
    for gradients in (traced(step, mode)(), traced(step, mode)()):
        for i, gradient in enumerate(gradients):
            expected = (i + 1) * (size + 1) / 2 * factor
            np.testing.assert_allclose(gradient, [expected], rtol=1e-6)


@BOTH
def test_groups_of_variables_that_share_a_name(mode, rank, size):
    """S5"""
    a, b, c = (tf.Variable(1.0, name="kernel") for _ in range(3))

    def step():
        with tf.GradientTape() as tape:
            loss = (a + 2.0 * b + 3.0 * c) * float(rank + 1)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, groups=[[a, b]])
        return tape.gradient(loss, [a, b, c])

    total = size * (size + 1) / 2
    assert [float(g) for g in traced(step, mode)()] == [total, 2 * total, 3 * total]


@BOTH
@MANY
def test_a_gradient_that_some_ranks_lack(mode, rank, size):
    """H21"""
    a, b, never = tf.Variable([1.0]), tf.Variable([1.0, 1.0]), tf.Variable(1.0)
    before = gradred.metrics().partly_absent

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a * x)
            if rank == 0:
                loss += tf.reduce_sum(b * x)
        return hvd.DistributedGradientTape(tape).gradient(loss, [a, b, never])

    step = traced(step, mode)
    for _ in range(2):
        of_a, of_b, of_never = step(tf.constant(2.0))
        np.testing.assert_array_equal(of_a, [2.0])
        np.testing.assert_allclose(of_b, np.float32([2, 2]) / size, rtol=1e-6)
        if mode == "eager":
            assert of_never is None
        else:
            np.testing.assert_array_equal(of_never, 0.0)
    assert gradred.metrics().partly_absent > before


@BOTH
@MANY
def test_a_gradient_that_comes_and_goes(mode, rank, size):
    """H21: a branch that the data takes."""
    a, b = tf.Variable(1.0), tf.Variable(1.0)

    def step(use_b):
        with tf.GradientTape() as tape:
            loss = tf.cond(use_b, lambda: a + b, lambda: a * 1.0)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [a, b])

    step = traced(step, mode)
    for i in range(6):
        users = [r for r in range(size) if (r + i) % 3 == 0]
        of_a, of_b = step(tf.constant(rank in users))
        assert float(of_a) == size
        assert (0.0 if of_b is None else float(of_b)) == len(users)


@BOTH
def test_slices(mode, rank, size):
    """H6: dense gradients and IndexedSlices in one call."""
    table, w = tf.Variable(tf.ones([6, 2])), tf.Variable(2.0)

    def step(dense):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, 5, 5])) * w
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=dense)
        of_table, of_w = tape.gradient(loss, [table, w])
        assert isinstance(of_table, tf.IndexedSlices) is not dense
        return tf.convert_to_tensor(of_table), of_w

    expected = np.zeros((6, 2))
    for r in range(size):
        expected[r] += 2.0 / size
        expected[5] += 4.0 / size
    for dense in (False, True):
        run = traced(lambda dense=dense: step(dense), mode)
        for of_table, of_w in (run(), run()):
            np.testing.assert_allclose(of_table, expected, rtol=1e-6)
            np.testing.assert_array_equal(of_w, 6.0)


def test_names_do_not_grow_in_eager_loops():
    from gradred.tensorflow import ops

    v = tf.Variable([1.0, 2.0])

    def step(n):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * 2.0)
        hvd.DistributedGradientTape(tape).gradient(loss, [v])
        hvd.allreduce(tf.ones([n]))
        hvd.allgather(tf.ones([n, 2]))

    step(1)
    declared = len(ops._declared)
    for n in range(20):
        step(n)
    assert len(ops._declared) == declared


# ---- H19: a step that fails on one rank


def failing_step(mode, bad, layer=5):
    """A step of ten layers in whose backward pass, at a layer, an op may fail.

    At layer 10 before any gradient is there; at layer -1 in the forward pass.
    """
    ws = [tf.Variable(tf.eye(3) * 0.9) for _ in range(10)]

    @tf.custom_gradient
    def fragile(x):
        def backward(cotangent):
            check = tf.debugging.Assert(tf.logical_not(bad), ["middle of backward"])
            with tf.control_dependencies([check] if check is not None else []):
                return tf.identity(cotangent)

        return tf.identity(x), backward

    def step():
        with tf.GradientTape() as tape:
            h = tf.ones([2, 3])
            if layer == -1:
                good = tf.debugging.Assert(tf.logical_not(bad), ["middle of backward"])
                with tf.control_dependencies([good]):
                    h = tf.identity(h)
            for i, w in enumerate(ws):
                h = tf.matmul(h, w)
                h = fragile(h) if i == layer else h
            h = fragile(h) if layer == 10 else h
            loss = tf.reduce_sum(h)
        gradients = hvd.DistributedGradientTape(tape, groups=5).gradient(loss, ws)
        for w, gradient in zip(ws, gradients, strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    return traced(step, mode), ws


@MANY
@pytest.mark.parametrize("layer", [0, 5, 9, 10, -1])
@pytest.mark.parametrize("known", [False, True], ids=["first step", "later step"])
def test_an_op_that_fails_on_one_rank_in_a_graph(known, layer, rank, size):
    bad = tf.Variable(False, trainable=False)
    step, ws = failing_step("graph", bad, layer)
    if known:
        step()
    values = [w.numpy() for w in ws]
    bad.assign(rank == 1)
    begin = time.monotonic()
    expected = tf.errors.InvalidArgumentError if rank == 1 else tf.errors.AbortedError
    with pytest.raises(expected) as caught:
        step()
    assert time.monotonic() - begin < 20  # no limit of the engine's is as short
    if rank == 1:
        assert "middle of backward" in str(caught.value)
    else:
        assert "gradred Abandoned: " in caught.value.message
        assert "rank 1" in caught.value.message
        assert "the step failed" in caught.value.message
    # Nobody has updated a variable, and the next step works.
    for w, value in zip(ws, values, strict=True):
        np.testing.assert_array_equal(w, value)
    bad.assign(False)
    first = float(step())
    assert float(step()) != first


@MANY
def test_an_op_that_fails_on_one_rank_in_eager_mode(rank, size):
    bad = tf.Variable(False, trainable=False)
    step, ws = failing_step("eager", bad)
    step()
    values = [w.numpy() for w in ws]
    bad.assign(rank == 1)
    with pytest.raises(tf.errors.InvalidArgumentError if rank == 1 else Abandoned) as caught:
        step()
    assert "middle of backward" in str(caught.value)  # on all: the others get the cause
    if rank != 1:
        assert "rank 1" in str(caught.value)
    for w, value in zip(ws, values, strict=True):
        np.testing.assert_array_equal(w, value)
    bad.assign(False)
    first = float(step())
    assert float(step()) != first


@MANY
def test_steps_that_fail_now_and_then(rank, size):
    bad = tf.Variable(False, trainable=False)
    step, ws = failing_step("graph", bad)
    failed = 0
    for i in range(30):
        culprit = i % (size + 1)
        bad.assign(rank == culprit)
        try:
            step()
        except tf.errors.OpError:
            failed += 1
    assert failed == sum(i % (size + 1) < size for i in range(30))
    sums = gradred.allreduce(np.array([w.numpy().sum() for w in ws]), name="sums", op=gradred.Max)
    np.testing.assert_array_equal(sums, [w.numpy().sum() for w in ws])


@MANY
def test_an_exception_between_steps_in_eager_mode(rank, size):
    """One rank skips a step of its own accord; nobody can know, and the next one matches."""
    v = tf.Variable(1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = v * float(rank)
        return float(hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [v])[0])

    for _ in range(3):
        assert step() == size * (size - 1) / 2


# ---- misuse


def test_not_a_tape():
    with pytest.raises(InvalidArgument, match="GradientTape, got int"):
        hvd.DistributedGradientTape(3)
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(InvalidArgument, match="already"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(InvalidArgument, match="predivide"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(gradred.Unsupported, match="Adasum"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum)


@MANY
def test_ranks_with_other_variables(rank):
    """H18: the first difference is named."""
    a, b = tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([3]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(a) + tf.reduce_sum(b)
    variables = [a, b] if rank == 0 else [b, a]
    with pytest.raises(gradred.Mismatch, match=r"\[2\].*\[3\]|\[3\].*\[2\]"):
        hvd.DistributedGradientTape(tape).gradient(loss, variables)


@MANY
def test_ranks_whose_graphs_produce_gradients_in_other_orders(rank, size):
    """Each variable is summed with itself, also where the ranks' graphs differ."""
    a, b = tf.Variable(tf.ones([2])), tf.Variable(tf.ones([2]))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            first, second = (a, b) if rank == 0 else (b, a)
            loss = tf.reduce_sum(tf.sin(first) * 3.0 + second)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [a, b])

    slope = 3.0 * np.cos(1.0)
    for _ in range(4):
        of_a, of_b = step()
        np.testing.assert_allclose(of_a, [slope + size - 1] * 2, rtol=1e-6)
        np.testing.assert_allclose(of_b, [1 + (size - 1) * slope] * 2, rtol=1e-6)


def test_groups_follow_the_graph(rank, size):
    """Variables are listed in an order that has nothing to do with the backward pass."""
    ws = {name: tf.Variable(tf.eye(2), name=f"w_{name}") for name in "dacb"}

    @tf.function
    def step_of_groups():
        with tf.GradientTape() as tape:
            h = tf.ones([1, 2])
            for name in "abcd":
                h = tf.tanh(tf.matmul(h, ws[name]))
            loss = tf.reduce_sum(h)
        tape = hvd.DistributedGradientTape(tape, groups=4)
        return tape.gradient(loss, list(ws.values()))

    first = [g.numpy() for g in step_of_groups()]  # as listed
    for _ in range(3):  # in the order of the graph
        for gradient, expected in zip(step_of_groups(), first, strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-6)
            assert np.abs(expected).max() > 0
    lines = gradred.plan("tape:step_of_groups").splitlines()
    names = [name for line in lines for name in "abcd" if f"w_{name}" in line]
    assert names == ["d", "c", "b", "a"], lines


def test_a_function_that_reduces_called_twice_in_a_step(rank, size):
    """Nothing orders the two copies of its body; each is reduced with its like."""
    ws = [tf.Variable(tf.ones([5]) * (k + 1)) for k in range(3)]

    @tf.function
    def gradients(scale):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * w) for w in ws]) * scale
        return hvd.DistributedGradientTape(tape).gradient(loss, ws)

    @tf.function
    def step_of_two():
        return gradients(tf.constant(1.0 + rank)), gradients(tf.constant(10.0 + rank))

    mean = (size - 1) / 2
    for _ in range(5):
        first, second = step_of_two()
        for k in range(3):
            assert first[k].numpy().tolist() == [2.0 * (k + 1) * (1.0 + mean)] * 5
            assert second[k].numpy().tolist() == [2.0 * (k + 1) * (10.0 + mean)] * 5


def test_abandoned_is_an_entry_error():
    assert issubclass(Abandoned, gradred.Error)
