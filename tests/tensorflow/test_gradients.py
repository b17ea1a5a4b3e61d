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
    return {
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "average": lambda x: hvd.allreduce(x),
        "scaled": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.3, postscale_factor=1.7),
        "group": lambda x: tf.concat(hvd.grouped_allreduce([x, 2.0 * x[:1]]), 0),
        "allgather": lambda x: hvd.allgather(x),
        "allgather of unequal parts": lambda x: hvd.allgather(x[: rank + 1]),
        "broadcast": lambda x: hvd.broadcast(x, size - 1),
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
    x = random((4, 3), rank, 1)
    for _ in range(2):
        y, cotangent, gradient = pull_back(x)
        left = everywhere(tf.reduce_sum(y * cotangent))
        right = everywhere(tf.reduce_sum(x * gradient))
        assert left == pytest.approx(right, rel=1e-12)
        assert gradient.shape == x.shape


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


def test_reductions_without_a_gradient_say_so():
    x = tf.constant([1.0])
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x, op=op)
        with pytest.raises(Unsupported, match="gradient"):
            tape.gradient(y, x)
