"""Gradients of collectives are their adjoints.

Each rank's gradient is the derivative of the sum of all ranks' losses by that rank's input. The
test of an operation C with adjoint C': the sums over ranks of <C x, y> and <x, C' y> are equal.
"""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.tensorflow as hvd
import tensorflow as tf
from gradred.errors import Unsupported

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.smoke]


def random(shape, rank, salt):
    return tf.constant(np.random.default_rng([salt, rank]).normal(size=shape))


def everywhere(value):
    """The sum over ranks of a number."""
    return float(gradred.allreduce(np.float64(value), op=gradred.Sum, name="everywhere"))


def cases(rank, size):
    others = [rank, 1][: size - 1]
    unequal = [6 - sum(others), *others]
    return {
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "average": lambda x: hvd.allreduce(x),
        "scaled": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.3, postscale_factor=1.7),
        "group": lambda x: tf.concat(hvd.grouped_allreduce([x, 2.0 * x[:1]]), 0),
        "allgather": lambda x: hvd.allgather(x),
        "allgather of unequal parts": lambda x: hvd.allgather(x[: rank + 1]),
        "grouped allgather": lambda x: tf.concat(hvd.grouped_allgather([x[rank:], 2.0 * x]), 0),
        "broadcast": lambda x: hvd.broadcast(x, size - 1),
        "alltoall": lambda x: hvd.alltoall(x)[: 6 - rank],
        "alltoall of unequal parts": lambda x: hvd.alltoall(x, unequal)[0],
        "reducescatter": lambda x: hvd.reducescatter(x[:5], op=hvd.Sum),
        "average reducescatter": lambda x: hvd.reducescatter(
            x, prescale_factor=0.3, postscale_factor=1.7
        ),
        "grouped reducescatter": lambda x: tf.concat(
            hvd.grouped_reducescatter([x, x[:1]], op=hvd.Sum), 0
        ),
        "twice": lambda x: hvd.allreduce(hvd.allgather(x) ** 1.0, op=hvd.Sum),
    }


@pytest.mark.parametrize("mode", ["eager", "tape inside", "tape outside"])
@pytest.mark.parametrize("name", list(cases(0, 1)))
def test_dot_products_agree(name, mode, rank, size):
    function = cases(rank, size)[name]
    if mode == "tape outside":
        function = tf.function(function)

    def pull_back(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            cotangent = tf.cast(tf.range(tf.size(y)) + 3 * rank, y.dtype)
            cotangent = tf.reshape(tf.cos(cotangent), tf.shape(y))
        return y, cotangent, tape.gradient(y, x, output_gradients=cotangent)

    if mode == "tape inside":
        pull_back = tf.function(pull_back)
    x = random((6, 3), rank, 1)
    for _ in range(2):
        y, cotangent, gradient = pull_back(x)
        left = everywhere(tf.reduce_sum(y * cotangent))
        right = everywhere(tf.reduce_sum(x * gradient))
        assert left == pytest.approx(right, rel=1e-12)
        assert gradient.shape == x.shape


SECOND = ("allgather", "broadcast", "alltoall", "reducescatter", "max", "product")


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_symmetric(name, in_graph, rank, size):
    """Of the Hessian H of all ranks' losses by all ranks' inputs: <H u, v> equals <u, H v>."""
    function = {
        **cases(rank, size),
        "max": lambda x: hvd.allreduce(x, op=hvd.Max),
        "product": lambda x: hvd.allreduce(x, op=hvd.Product),
    }[name]
    weights = random((6 * size, 3), rank, 7)

    def loss_of(x):
        y = function(x**2)
        return tf.reduce_sum(weights[: tf.shape(y)[0]] * y**3)

    def derivatives(x, direction):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = loss_of(x)
            first = inner.gradient(loss, x)
            along = tf.reduce_sum(first * direction)
        return first, outer.gradient(along, x)

    if in_graph:
        derivatives = tf.function(derivatives)
    x, u, v = (random((6, 3), rank, salt) for salt in (4, 5, 6))
    first, hu = derivatives(x, u)
    _, hv = derivatives(x, v)
    left, right = (everywhere(tf.reduce_sum(a * b)) for a, b in ((hu, v), (hv, u)))
    assert left == pytest.approx(right, rel=1e-10) and left != 0
    # Both are derivatives of the loss: against differences, whose error is about step squared.
    step = 1e-5
    ahead, behind = (derivatives(x + sign * step * v, u)[0] for sign in (1, -1))
    change = everywhere(tf.reduce_sum((ahead - behind) * u)) / (2 * step)
    assert change == pytest.approx(right, rel=1e-5)
    change = (everywhere(loss_of(x + step * u)) - everywhere(loss_of(x - step * u))) / (2 * step)
    assert change == pytest.approx(everywhere(tf.reduce_sum(first * u)), rel=1e-5)


def test_second_derivatives(rank, size):
    x = random((3,), rank, 2)

    def twice(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) ** 3)
            first = inner.gradient(y, x)
            z = tf.reduce_sum(first * first)
        return first, outer.gradient(z, x)

    total = sum(random((3,), r, 2).numpy() for r in range(size))
    for function in (twice, tf.function(twice)):
        first, second = function(x)
        np.testing.assert_allclose(first, size * 3 * total**2, rtol=1e-12)
        # d/dx_r of the sum over ranks of |first|^2, first = 3 n t^2, t the sum.
        np.testing.assert_allclose(second, size * 36 * size**2 * total**3, rtol=1e-12)


def test_a_persistent_tape_may_be_asked_twice(rank, size):
    def twice(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = hvd.allreduce(x, op=hvd.Sum)
        return tape.gradient(y, x), tape.gradient(y, x, output_gradients=2.0 * y)

    x = tf.constant([1.0, 2.0]) * (rank + 1)
    total = np.float32([1, 2]) * size * (size + 1) / 2
    for function in (twice, tf.function(twice)):
        for _ in range(3):
            first, second = function(x)
            np.testing.assert_array_equal(first, [size, size])
            np.testing.assert_array_equal(second, 2 * size * total)


@pytest.mark.parametrize("in_graph", [False, True])
def test_gradients_of_extrema_and_products(in_graph, rank, size):
    everyone = np.array([[r, 5.0, -r, 0.0 if r == 0 else 2.0] for r in range(size)], np.float32)
    x = tf.constant(everyone[rank])

    def gradient(x, op, **options):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x, op=op, **options)
        return tape.gradient(y, x, output_gradients=tf.constant([1.0, 2.0, 3.0, 4.0]) * (rank + 1))

    run = (lambda *a, **k: tf.function(gradient)(*a, **k)) if in_graph else gradient
    total = np.array([1.0, 2.0, 3.0, 4.0]) * size * (size + 1) / 2
    holds = {hvd.Max: everyone == everyone.max(0), hvd.Min: everyone == everyone.min(0)}
    for op, held in holds.items():
        expected = total * held[rank] / held.sum(0)
        np.testing.assert_allclose(run(x, op), expected, rtol=1e-6)
        scaled = run(x, op, prescale_factor=0.3, postscale_factor=1.7)
        np.testing.assert_allclose(scaled, 0.51 * expected, rtol=1e-6)
        rounded = run(x, op, compression=hvd.Compression.bf16)
        np.testing.assert_allclose(rounded, expected, rtol=1e-6)
    held = holds[hvd.Min]  # a negative factor makes the maximum that of the smallest
    scaled = run(x, hvd.Max, prescale_factor=-1.0)
    np.testing.assert_allclose(scaled, -total * held[rank] / held.sum(0), rtol=1e-6)
    others = np.delete(everyone, rank, 0).prod(0)
    np.testing.assert_allclose(run(x, hvd.Product), total * others, rtol=1e-6)
    scaled = run(x, hvd.Product, prescale_factor=0.5, postscale_factor=3.0)
    np.testing.assert_allclose(scaled, 3 * 0.5**size * total * others, rtol=1e-6)


def test_reductions_without_a_gradient_say_so():
    x = tf.constant([1.0])
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.reducescatter(x, op=op)
        with pytest.raises(Unsupported, match="gradient of reducescatter"):
            tape.gradient(y, x)
