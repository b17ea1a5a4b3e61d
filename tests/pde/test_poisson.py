"""Poisson's equation: order of convergence, the same on any number of ranks, gradients."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import tensorflow as tf
from gradred import diff
from gradred.diff import Context
from gradred.pde import Grid, Poisson

pytestmark = [pytest.mark.ranks(1, 2, 3, 4)]


@pytest.fixture(scope="module")
def plane():
    gradred.init()
    size = gradred.size()
    plane = Context(dims=(2, 2) if size == 4 else (size, 1), name="plane")
    alone = Context([[rank] for rank in range(size)], dims=(1, 1), name="alone")
    yield plane, alone
    gradred.barrier()  # who closes first would fail the others' last operation
    plane.close()
    alone.close()


def grid_of(nodes, context):
    """The unit square, with twice as many cells along the second dimension."""
    shape = (nodes, 2 * nodes + 1)
    spacing = [1 / (n + 1) for n in shape]
    return Grid(shape, context, spacing=spacing, origin=spacing)


def coefficient(x, y):
    return 1 + 0.5 * x * y + 0.3 * np.sin(2 * np.pi * y)


def solution(x, y):
    return np.sin(np.pi * x) * np.sin(2 * np.pi * y) * np.exp(x)


def source(x, y):
    """- div(k grad u) by differences of high order, of the two above."""
    h = 1e-3

    def d(f, dx, dy):
        return (
            8 * (f(x + h * dx, y + h * dy) - f(x - h * dx, y - h * dy))
            - (f(x + 2 * h * dx, y + 2 * h * dy) - f(x - 2 * h * dx, y - 2 * h * dy))
        ) / (12 * h)

    def second(f, dx, dy):
        return (
            16 * (f(x + h * dx, y + h * dy) + f(x - h * dx, y - h * dy))
            - (f(x + 2 * h * dx, y + 2 * h * dy) + f(x - 2 * h * dx, y - 2 * h * dy))
            - 30 * f(x, y)
        ) / (12 * h * h)

    k, u = coefficient, solution
    return -sum(d(k, *axis) * d(u, *axis) + k(x, y) * second(u, *axis) for axis in ((1, 0), (0, 1)))


@pytest.mark.parametrize("method", ["differences", "elements"])
def test_error_falls_with_the_square_of_the_spacing(method, plane):
    errors = []
    for nodes in (7, 15, 31):
        grid = grid_of(nodes, plane[0])
        problem = Poisson(grid, method)
        u = problem(coefficient(*problem.points.T), source(*grid.coordinates()))
        errors.append(abs(grid.whole(u.numpy()) - grid.whole(solution(*grid.coordinates()))).max())
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    assert orders == pytest.approx(2, abs=0.15), errors


@pytest.mark.parametrize("method", ["differences", "elements"])
def test_fields_and_gradients_are_those_of_one_rank(method, plane):
    """To 1e-12 of the largest, of a loss by field, coefficient and source."""
    results = []
    for context in plane:
        grid = grid_of(8, context)
        problem = Poisson(grid, method)
        inputs = [
            tf.constant(coefficient(*problem.points.T)),
            tf.constant(source(*grid.coordinates())),
        ]
        weights = grid.block(np.cos(np.arange(np.prod(grid.shape))).reshape(grid.shape))

        @tf.function
        def gradients(k, f, problem=problem, weights=weights, context=context):
            with tf.GradientTape() as tape:
                tape.watch([k, f])
                u = problem(k, f, rtol=1e-14)
                loss = context.end(tf.reduce_sum(u**2 * weights))
            return u, tape.gradient(loss, [k, f])

        u, (by_k, by_f) = gradients(*inputs)
        # Of points shared by no two ranks, in one order.
        points = diff.allgather(problem.points, context).numpy()
        order = np.lexsort(np.round(points, 9).T)
        by_k = diff.allgather(by_k, context).numpy()[order]
        results.append((grid.whole(u.numpy()), by_k, grid.whole(by_f.numpy())))
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * abs(other).max())


@pytest.mark.parametrize("method", ["differences", "elements"])
def test_taylor(method, plane):
    """The remainder behind the gradient by the coefficient falls with the square of the step."""
    context = plane[0]
    grid = grid_of(6, context)
    problem = Poisson(grid, method)
    k = tf.constant(coefficient(*problem.points.T))
    change = tf.constant(np.sin(7 * problem.points.sum(1)))
    f = tf.ones(grid.block_shape, tf.float64)

    def loss_of(k):
        return tf.reduce_sum(problem(k, f, rtol=1e-13) ** 2)

    def everywhere(value):
        return float(diff.allreduce(value, context))

    with tf.GradientTape() as tape:
        tape.watch(k)
        loss = context.end(loss_of(k))
    slope = everywhere(tf.reduce_sum(tape.gradient(loss, k) * change))
    remainders = [
        abs(everywhere(loss_of(k + h * change)) - everywhere(loss) - h * slope)
        for h in (0.2, 0.1, 0.05)
    ]
    orders = np.log2(np.divide(remainders[:-1], remainders[1:]))
    assert orders == pytest.approx(2, abs=0.2), remainders


def test_bad_input_is_named(plane):
    grid = grid_of(5, plane[0])
    error = gradred.errors.InvalidArgument
    with pytest.raises(error, match="expected 'differences' or 'elements'"):
        Poisson(grid, "volumes")
    problem = Poisson(grid)
    with pytest.raises(error, match="expected one at each of the"):
        problem.matrix(np.ones(3))
    with pytest.raises(error, match="source: expected shape"):
        problem(np.ones(len(problem.points)), np.ones(3))
    with pytest.raises(error, match=r"diagonal entry|definite"):
        problem(np.zeros(len(problem.points)), np.ones(grid.block_shape))
