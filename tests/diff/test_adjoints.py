"""Every operation's gradient is its adjoint, in all ways to ask for it, and can be differentiated.

Of a linear operation C with adjoint C': the sums over ranks of <C x, y> and <x, C' y> are equal.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tensorflow as tf
from diff.cases import NAMES, everywhere, linear, nonlinear, random
from gradred import diff

MODES = ("eager", "tape inside", "tape outside", "loop")


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3, 4)
def test_names(context):
    assert tuple(linear(context)) == NAMES


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", NAMES)
def test_dot_products_agree(name, context, rank, size):
    for mode in MODES[:1] if size == 1 else MODES[1:3] if size == 4 else MODES:
        check_dot_products(name, mode, context, rank)


def in_a_loop(function, context):
    """``function`` once before a loop and twice in it."""

    def looped(x):
        return context.while_loop(
            lambda i, _: i < 2,
            lambda i, y: (i + 1, 0.5 * y + function(x)),
            (tf.constant(0), function(x)),
        )[1]

    return looped


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32])
def test_gradients_of_other_dtypes(dtype, context, rank):
    """Of small whole numbers they are those of float64."""
    numbers = np.random.default_rng(rank).integers(0, 4, (6, 3))

    def gradient(function, dtype):
        x = tf.constant(numbers, dtype)
        with tf.GradientTape() as tape:
            tape.watch(x)
            context.begin(x)
            y = context.end(function(x))
        cotangent = tf.cast(tf.reshape((tf.range(tf.size(y)) + rank) % 3, tf.shape(y)), dtype)
        zero = tf.UnconnectedGradients.ZERO
        return tape.gradient(y, x, cotangent, zero)

    for name, function in {**linear(context), **nonlinear(context)}.items():
        ours = gradient(function, dtype)
        assert ours.dtype == dtype, name
        inexact = 0
        if name in ("mean", "loop", "max", "min"):  # these divide, or multiply by fractions
            inexact = {tf.float16: 2**-8, tf.bfloat16: 2**-5, tf.float32: 2**-20}[dtype]
        np.testing.assert_allclose(
            tf.cast(ours, tf.float64), gradient(function, tf.float64), inexact, err_msg=name
        )


def check_dot_products(name, mode, context, rank):
    function = linear(context)[name]
    if mode == "tape outside":
        function = context.function(function) if name == "several" else tf.function(function)
    if mode == "loop":
        function = in_a_loop(function, context)

    def pull_back(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            cotangent = tf.cast(tf.range(tf.size(y)) + 3 * rank, y.dtype)
            cotangent = tf.reshape(tf.cos(cotangent), tf.shape(y))
        zero = tf.UnconnectedGradients.ZERO
        return y, cotangent, tape.gradient(y, x, cotangent, zero)

    if mode in ("tape inside", "loop"):
        pull_back = tf.function(pull_back)
    x = random((6, 3), rank, 1)
    for _ in range(2):
        y, cotangent, gradient = pull_back(x)
        left = everywhere(tf.reduce_sum(y * cotangent))
        right = everywhere(tf.reduce_sum(x * gradient))
        assert left == pytest.approx(right, rel=1e-12)
        assert gradient.shape == x.shape


@pytest.mark.smoke
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", [*NAMES, "max", "min", "product"])
def test_second_derivatives(name, context, rank, size):
    """The Hessian of all ranks' losses is symmetric, and both derivatives fit differences."""
    in_graph = size == 2
    function = {**linear(context), **nonlinear(context)}[name]

    def loss_of(x):
        y = function(x**2)
        weights = tf.reshape(tf.cos(tf.cast(tf.range(tf.size(y)) + rank, y.dtype)), tf.shape(y))
        return tf.reduce_sum(weights * y**3)

    def derivatives(x, direction):
        with tf.GradientTape() as outer:
            outer.watch(x)
            context.begin(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                context.begin(x)
                loss = context.end(loss_of(x))
            first = inner.gradient(loss, x)
            along = context.end(tf.reduce_sum(first * direction))
        return first, outer.gradient(along, x)

    if in_graph:
        derivatives = tf.function(derivatives)
    x, u, v = (random((6, 3), rank, salt) for salt in (4, 5, 6))
    first, hu = derivatives(x, u)
    _, hv = derivatives(x, v)
    left, right = (everywhere(tf.reduce_sum(a * b)) for a, b in ((hu, v), (hv, u)))
    assert left == pytest.approx(right, rel=1e-10) and left != 0
    step = 1e-5  # errors of differences are about its square
    ahead, behind = (derivatives(x + sign * step * v, u)[0] for sign in (1, -1))
    change = everywhere(tf.reduce_sum((ahead - behind) * u)) / (2 * step)
    assert change == pytest.approx(right, rel=1e-5)
    change = (everywhere(loss_of(x + step * u)) - everywhere(loss_of(x - step * u))) / (2 * step)
    assert change == pytest.approx(everywhere(tf.reduce_sum(first * u)), rel=1e-5)


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", [*NAMES, "max", "min", "product"])
def test_taylor(name, context, rank):
    """The remainder behind the first derivative falls with the square of the step."""
    x, u = random((6, 3), rank, 8), random((6, 3), rank, 9)
    function = {**linear(context), **nonlinear(context)}[name]

    @tf.function
    def loss_of(x):
        context.begin(x)
        y = function(tf.sin(x))
        weights = tf.reshape(tf.cos(tf.cast(tf.range(tf.size(y)) + rank, y.dtype)), tf.shape(y))
        return context.end(tf.reduce_sum(weights * y**2))

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = loss_of(x)
    slope = everywhere(tf.reduce_sum(tape.gradient(loss, x) * u))
    value = everywhere(loss)
    remainders = [
        abs(everywhere(loss_of(x + h * u)) - value - h * slope) for h in (1e-3, 5e-4, 2.5e-4)
    ]
    if name == "shift to an end" and context.size == 1:  # no rank gets anything
        assert (value, slope, remainders) == (0, 0, [0, 0, 0])
        return
    for coarse, fine in itertools.pairwise(remainders):
        assert np.log2(coarse / fine) == pytest.approx(2, abs=0.1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_holders_share_the_cotangent_of_an_extremum(context, rank, size):
    everyone = np.array([[r, 5.0, -r, 0.0 if r == 0 else 2.0] for r in range(size)])
    x = tf.constant(everyone[rank])
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    total = weights * size * (size + 1) / 2

    def gradient(op):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = diff.allreduce(x, context, op)
        return tape.gradient(y, x, tf.constant(weights * (rank + 1)))

    for op, held in (("max", everyone == everyone.max(0)), ("min", everyone == everyone.min(0))):
        np.testing.assert_allclose(gradient(op), total * held[rank] / held.sum(0), rtol=1e-14)
    np.testing.assert_allclose(
        gradient("product"), total * np.delete(everyone, rank, 0).prod(0), rtol=1e-14
    )


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("in_graph", [False, True])
def test_replicated_parameters_get_the_gradient_of_the_sum(in_graph, context, rank, size):
    data = [np.random.default_rng(r).normal(size=3) for r in range(size)]
    parameter = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64)

    def part(p):
        return tf.reduce_sum((p * data[rank]) ** 2)

    def value_and_gradients():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = diff.global_loss(part, context, parameter)
            first = inner.gradient(loss, parameter)
            norm = context.end(tf.reduce_sum(first**2))
        return loss, first, outer.gradient(norm, parameter)

    if in_graph:
        value_and_gradients = tf.function(value_and_gradients)
    loss, first, second = value_and_gradients()
    squares = sum(d**2 for d in data)
    values = parameter.numpy()
    np.testing.assert_allclose(loss, (values**2 * squares).sum(), rtol=1e-13)
    np.testing.assert_allclose(first, 2 * values * squares, rtol=1e-13)
    np.testing.assert_allclose(second, 8 * values * squares**2, rtol=1e-13)
    # The trap: with allreduce in place of psum, every rank's loss counts.
    with tf.GradientTape() as tape:
        trapped = diff.allreduce(part(tf.convert_to_tensor(parameter)), context)
    mine = 2 * values * data[rank] ** 2
    np.testing.assert_allclose(tape.gradient(trapped, parameter), size * mine, rtol=1e-13)
