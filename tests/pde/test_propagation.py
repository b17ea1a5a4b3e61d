"""Waves and heat over the ranks: values, gradients, and what is refused."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import gradred
import tensorflow as tf
from gradred.errors import InvalidArgument, Unsupported
from gradred.pde import AcousticWave, Grid, Heat
from gradred.pde.composed import composed

pytestmark = pytest.mark.ranks(2, 3, 4)

STEPS = 30
SOURCES, RECEIVERS = [(5, 7), (20, 3)], [(0, 0), (11, 12), (21, 26), (5, 7)]
SHAPE = (22, 27)


def problem_of(kind, context, **options):
    grid = Grid(SHAPE, context, spacing=(1.0, 1.2))
    given = dict(sources=SOURCES, receivers=RECEIVERS, **options)
    if kind is AcousticWave:
        given = dict(dt=0.4, layer=5, **given)
    return kind(grid, **{"dt": 0.1, "steps": STEPS, **given})


def data(dtype="float64", steps=STEPS):
    rng = np.random.default_rng(3)
    coefficient = rng.uniform(0.7, 1.4, SHAPE).astype(dtype)
    signals = rng.standard_normal((steps, len(SOURCES))).astype(dtype)
    weights = rng.standard_normal((steps, len(RECEIVERS))).astype(dtype)
    return coefficient, signals, weights


def run(problem, coefficient, signals, weights, graph=False, propagate=None):
    """Records of all ranks, and the gradients of their weighted sum, of the whole grid."""
    grid = problem.grid
    block = tf.constant(grid.block(coefficient))
    signals = tf.constant(signals)
    forward = problem if propagate is None else functools.partial(propagate, problem)

    def both():
        with tf.GradientTape() as tape:
            tape.watch([block, signals])
            records = forward(block, signals)
            value = grid.context.end(tf.reduce_sum(records * weights))
        return records, tape.gradient(value, [block, signals])

    records, (by_coefficient, by_signals) = (tf.function(both) if graph else both)()
    total = (
        gradred.grouped_allreduce(
            [records.numpy(), by_signals.numpy()], op=gradred.Sum, name="test.sum"
        )
        if grid.context.size > 1
        else [records.numpy(), by_signals.numpy()]
    )
    return total[0], grid.whole(by_coefficient.numpy()), total[1]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [AcousticWave, Heat])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_grid_of_ranks_gives_the_bits_of_one_rank(contexts, kind, dtype):
    grids, alone = contexts
    given = data(dtype)
    expected = run(problem_of(kind, alone, dtype=dtype), *given)
    assert np.abs(expected[0]).max() > 0.01
    for context in grids:
        for graph in (False, True):
            got = run(problem_of(kind, context, dtype=dtype), *given, graph=graph)
            for mine, theirs in zip(got, expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [AcousticWave, Heat])
def test_checkpoints_give_the_same_gradients(contexts, kind):
    context = contexts[0][0]
    steps = 4 * STEPS
    given = data(steps=steps)
    expected = run(problem_of(kind, context, steps=steps), *given)
    little = dict(memory_nbytes=400_000 // context.size, threads=2, steps=steps)
    assert problem_of(kind, context, **little).steps_between_checkpoints < steps
    for options in (little, dict(keep=False, steps=steps)):
        got = run(problem_of(kind, context, **options), *given)
        for mine, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [AcousticWave, Heat])
def test_gradient_by_difference_quotients(contexts, kind):
    problem = problem_of(kind, contexts[0][-1])
    coefficient, signals, weights = data()
    direction = np.random.default_rng(5).uniform(-1, 1, SHAPE)
    _, gradient, by_signals = run(problem, coefficient, signals, weights)
    slope = np.sum(gradient * direction)

    def value(step):
        return np.sum(run(problem, coefficient + step * direction, signals, weights)[0] * weights)

    errors = [abs((value(h) - value(-h)) / (2 * h) - slope) for h in (4e-3, 2e-3)]
    assert errors[0] < 1e-2 * abs(slope)
    assert 3.5 < errors[0] / errors[1] < 4.5
    # Linear in the signals.
    assert np.sum(by_signals * signals) == pytest.approx(value(0.0), rel=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [AcousticWave, Heat])
def test_the_native_loop_is_the_composed_scheme(contexts, kind):
    """Records and gradients to rounding."""
    for context in contexts[0]:
        problem = problem_of(kind, context, steps=10)
        native = run(problem, *data(steps=10), graph=True)
        other = run(problem, *data(steps=10), graph=True, propagate=composed)
        for mine, theirs in zip(native, other, strict=True):
            # Rounding of 10 steps.
            atol = 1e-12 * np.abs(theirs).max()
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)


@pytest.mark.ranks(2)
def test_the_composed_scheme_has_second_derivatives(contexts):
    """A Hessian times a vector against the difference of two gradients of the native loop."""
    problem = problem_of(Heat, contexts[0][-1], steps=6)
    context, grid = problem.grid.context, problem.grid
    coefficient, signals, weights = data(steps=6)
    direction = np.random.default_rng(6).uniform(-1, 1, SHAPE)
    block, way = tf.constant(grid.block(coefficient)), tf.constant(grid.block(direction))

    @tf.function
    def hessian_product():
        with tf.GradientTape() as outer:
            outer.watch(block)
            with tf.GradientTape() as inner:
                inner.watch(block)
                records = composed(problem, block, signals)
                value = context.end(tf.reduce_sum(records * weights))
            slope = context.end(tf.reduce_sum(inner.gradient(value, block) * way))
        return outer.gradient(slope, block)

    product = grid.whole(hessian_product().numpy())
    step = 1e-5
    ahead, behind = (
        run(problem, coefficient + sign * step * direction, signals, weights)[1] for sign in (1, -1)
    )
    difference = (ahead - behind) / (2 * step)
    np.testing.assert_allclose(product, difference, rtol=0, atol=1e-6 * np.abs(difference).max())


def manufactured_error(kind, context, nodes):
    """Largest error at the end for a field that is known: t^3 sin(pi x) sin(pi y) on a square."""
    h = 1 / (nodes + 1)
    grid = Grid((nodes, nodes), context, spacing=h, origin=h)
    every = [(i, j) for i in range(nodes) for j in range(nodes)]
    x, y = np.meshgrid(*2 * [h * np.arange(1, nodes + 1)], indexing="ij")
    shape = np.sin(np.pi * x) * np.sin(np.pi * y)
    end = 0.5
    steps = round(end / (0.5 * h if kind is AcousticWave else 0.15 * h * h))
    dt = end / steps
    t = dt * np.arange(steps)[:, None, None]
    if kind is AcousticWave:
        coefficient = 1 + 0.3 * x * y
        source = 6 * t * shape + coefficient**2 * 2 * np.pi**2 * t**3 * shape
    else:
        coefficient = 1 + 0.3 * x * y
        # div(k grad u) = k laplacian(u) + grad k . grad u
        dx = np.pi * np.cos(np.pi * x) * np.sin(np.pi * y)
        dy = np.pi * np.sin(np.pi * x) * np.cos(np.pi * y)
        flow = -coefficient * 2 * np.pi**2 * shape + 0.3 * (y * dx + x * dy)
        source = 3 * t**2 * shape - t**3 * flow
    problem = kind(grid, dt=dt, steps=steps, sources=every, receivers=every)
    records = problem(grid.block(coefficient), source.reshape(steps, -1)).numpy()
    last = gradred.allreduce(records[-1], op=gradred.Sum, name="test.last")
    return np.abs(last - end**3 * shape.reshape(-1)).max()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [AcousticWave, Heat])
def test_error_falls_with_the_square_of_the_spacing(contexts, kind):
    context = contexts[0][0]
    errors = [manufactured_error(kind, context, nodes) for nodes in (7, 15)]
    assert errors[0] < 0.01
    assert 3.5 < errors[0] / errors[1] < 4.5


@pytest.mark.ranks(2)
def test_the_layer_absorbs_waves(contexts):
    """A pulse is what it would be on a grid so large that its edges are not felt."""
    context = contexts[0][0]
    steps = 230
    pulse = np.exp(-0.02 * (np.arange(steps + 1) - 30.0) ** 2)
    records = {}
    for nodes, layer in ((150, 0), (60, 0), (60, 18)):
        middle = nodes // 2
        wave = AcousticWave(
            Grid((nodes, nodes), context),
            dt=0.5,
            steps=steps,
            sources=[(middle, middle)],
            receivers=[(middle + i, middle + j) for i in (-11, 0, 11) for j in (-11, 5)],
            layer=layer,
        )
        mine = wave(np.ones(wave.grid.block_shape), np.diff(pulse)[:, None]).numpy()
        name = f"test.layer.{nodes}.{layer}"
        records[nodes, layer] = gradred.allreduce(mine, op=gradred.Sum, name=name)
    free = records[150, 0]
    scale = np.abs(free).max()
    assert np.abs(records[60, 0] - free).max() > 0.1 * scale
    assert np.abs(records[60, 18] - free).max() < 5e-3 * scale
    # What is left when the pulse has passed.
    assert np.abs(records[60, 18][-20:]).max() < 0.02 * scale


def test_one_message_a_neighbour_and_step(contexts):
    for context in contexts[0]:
        problem = problem_of(AcousticWave, context)
        problem(problem.grid.block(data()[0]), data()[1])
        neighbours = [context.neighbour(d, by) for d in (0, 1) for by in (-1, 1)]
        assert problem.traffic.messages == STEPS * sum(r is not None for r in neighbours)


def test_a_step_that_is_too_long_for_one_rank_fails_on_all(contexts):
    context = contexts[0][0]
    problem = problem_of(AcousticWave, context)
    coefficient, signals, _ = data()
    coefficient[-1, -1] = 9.0  # in the last rank's block
    with pytest.raises((InvalidArgument, tf.errors.OpError), match="Courant number is") as caught:
        problem(problem.grid.block(coefficient), signals)
    texts = gradred.allgather_object(str(caught.value))
    assert len(set(texts)) == 1
    assert f"rank {context.size - 1}" in texts[0] or context.size == 1
    coefficient[-1, -1] = np.nan
    with pytest.raises((InvalidArgument, tf.errors.OpError), match="positive and finite"):
        problem(problem.grid.block(coefficient), signals)
    # The context goes on.
    coefficient[-1, -1] = 1.0
    assert problem(problem.grid.block(coefficient), signals).shape == (STEPS, len(RECEIVERS))


def test_wrong_shapes_fail_on_all_ranks(contexts):
    problem = problem_of(Heat, contexts[0][0])
    coefficient, signals, _ = data()
    for block, given in (
        (np.ones((3, 4)), signals),
        (problem.grid.block(coefficient), signals[:-1]),
    ):
        with pytest.raises((InvalidArgument, tf.errors.OpError), match=r"must be float64 of shape"):
            problem(block, given)


def test_what_one_rank_cannot_convert_fails_on_all(contexts):
    context = contexts[0][0]
    problem = problem_of(Heat, context)
    coefficient, signals, _ = data()
    block = problem.grid.block(coefficient)
    last = context.rank == context.size - 1
    with pytest.raises((ValueError, InvalidArgument, tf.errors.OpError)) as caught:
        problem(tf.cast(block, tf.float32) if last else block, signals)
    assert "float32" in str(caught.value)
    assert last or f"rank {context.size - 1}" in str(caught.value)
    assert problem(block, signals).shape == (STEPS, len(RECEIVERS))


def test_a_block_of_another_shape_on_one_rank_fails_on_all(contexts):
    grid = problem_of(Heat, contexts[0][0]).grid
    context = grid.context
    last = context.rank == context.size - 1
    block = np.ones(grid.block_shape)
    with pytest.raises(
        InvalidArgument, match=r"Grid.whole: expected shape \(.*, got \(1,\)"
    ) as why:
        grid.whole(block[:1, 0] if last else block)
    assert last or f"rank {context.size - 1}: " in str(why.value)
    assert grid.whole(block).shape == SHAPE


@pytest.mark.ranks(2)
def test_settings_that_cannot_be_are_refused(contexts):
    context = contexts[0][0]
    grid = Grid(SHAPE, context)
    given = dict(dt=0.1, steps=4, sources=[], receivers=[(0, 0)])
    for options, text in (
        (dict(sources=[(22, 0)]), r"source 0 is at node \(22, 0\)"),
        (dict(steps=0), "steps must be at least 1"),
        (dict(dt=0.0), "dt and threads must be positive"),
        (dict(layer=2), "layer must be 0 or at least 4"),
        (dict(layer=12), "layer"),
        (dict(memory_nbytes=100), "needs at least"),
        (dict(dtype="float16"), "float32 or float64"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            AcousticWave(grid, **{**given, **options})
    with pytest.raises(InvalidArgument, match="nodes for"):
        Grid((1, 0), context)
    with pytest.raises(InvalidArgument, match="dimensions over a context"):
        Grid((8,), context)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [-1.5, 0.0, np.nan])
@pytest.mark.parametrize("equation", [AcousticWave, Heat])
def test_coefficients_that_are_not_positive_are_refused_on_all(equation, value, contexts, rank):
    problem = problem_of(equation, contexts[0][0])
    block = problem.grid.block(data()[0])
    if rank == 1:
        block[1, 1] = value
    with pytest.raises(InvalidArgument, match="the coefficient must be positive and finite"):
        problem(block, data()[1])


@pytest.mark.ranks(2)
def test_a_second_derivative_is_refused(contexts):
    problem = problem_of(Heat, contexts[1])
    block, signals = tf.constant(data()[0]), tf.constant(data()[1])
    with tf.GradientTape() as outer:
        outer.watch(block)
        with tf.GradientTape() as inner:
            inner.watch(block)
            value = tf.reduce_sum(problem(block, signals) ** 2)
        square = tf.reduce_sum(inner.gradient(value, block) ** 2)
    with pytest.raises(Unsupported, match=r"gradred\.pde\.composed"):
        outer.gradient(square, block)
