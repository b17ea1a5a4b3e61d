"""Halves on the wire and in the computation reach the loss of float32."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from harness.training import assert_same_on_all_ranks, keras, scale_of, scaled, unscaled

pytestmark = [pytest.mark.ranks(2, deadline=180), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741
ROWS, WIDTH, NOISE = 512, 8, 0.5


def problem(rank, size):
    """A noisy function of eight numbers: no network can reach zero. This rank's rows of it."""
    generator = np.random.default_rng(11)
    x = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = np.tanh(x @ generator.normal(size=(WIDTH, 2))) + NOISE * generator.normal(size=(ROWS, 2))
    return x[rank::size], y[rank::size].astype(np.float32)


def final_loss(rank, size, policy, wire):
    """The loss over all ranks' samples after 64 steps, in float64."""
    x, y = problem(rank, size)
    keras.mixed_precision.set_global_policy(policy)
    try:
        keras.utils.set_random_seed(4)
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                layers.Dense(16, activation="tanh"),
                layers.Dense(2, dtype="float32"),
            ]
        )
        compression = getattr(hvd.Compression, wire)
        optimizer = hvd.DistributedOptimizer(O.SGD(0.1, momentum=0.9), compression=compression)
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
        prediction = np.asarray(model(x), np.float64)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert_same_on_all_ranks(model.get_weights())
    return float(hvd.allreduce(np.mean((prediction - y) ** 2), name="final"))


@pytest.fixture(scope="module")
def reference(rank, size):
    return final_loss(rank, size, "float32", "none")


@pytest.mark.parametrize(
    ("policy", "wire"),
    [
        ("float32", "fp16"),
        ("float32", "bf16"),
        ("mixed_float16", "none"),
        ("mixed_float16", "fp16"),
        ("mixed_bfloat16", "bf16"),
    ],
)
def test_halves_reach_the_loss_of_float32(policy, wire, reference, rank, size):
    untrained = np.mean(np.square(problem(0, 1)[1]))
    assert reference < 0.7 * untrained
    assert final_loss(rank, size, policy, wire) == pytest.approx(reference, rel=0.05)


@pytest.mark.parametrize("eager", [False, True])
def test_overflow_on_the_wire_skips_the_step_on_all_ranks(eager, rank, size):
    """S7: finite in float32, infinite in float16, on one rank alone."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    inner = O.SGD(2.0**-20)
    optimizer = hvd.DistributedOptimizer(
        keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0),
        compression=hvd.Compression.fp16,
    )
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=eager)
    x, y = np.ones((2, 4), np.float32), np.zeros((2, 1), np.float32)
    model.fit(x, y, verbose=0)
    for culprit in range(size):
        before = gradred.metrics().saturated
        values = model.get_weights()
        scale = scale_of(optimizer)
        target = np.full((2, 1), 1e6 if rank == culprit else 0.0, np.float32)
        model.fit(x, y + target, verbose=0)
        for a, b in zip(values, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert scale_of(optimizer) == scale / 2
        assert gradred.metrics().saturated - before == 5  # kernel and bias, on every rank alike
    values = model.get_weights()
    model.fit(x, y + 1.0, verbose=0)
    assert any((a != b).any() for a, b in zip(values, model.get_weights(), strict=True))
    assert_same_on_all_ranks(model.get_weights())


@pytest.mark.parametrize("mode", ["function", "eager"])
@pytest.mark.parametrize("order", ["scale outside", "scale inside"])
def test_loss_scale_in_a_loop_of_ones_own(order, mode, rank, size):
    """H8"""
    scale = keras.mixed_precision.LossScaleOptimizer
    if order == "scale outside":
        optimizer = scale(hvd.DistributedOptimizer(O.SGD(0.05)), initial_scale=8.0)
    else:
        optimizer = hvd.DistributedOptimizer(scale(O.SGD(0.05), initial_scale=8.0))
    v = tf.Variable([1.0, 2.0])
    optimizer.build([v])

    def step(x):
        with tf.GradientTape() as tape:
            loss = scaled(optimizer, tf.reduce_sum(v * x))
        gradients = unscaled(optimizer, tape.gradient(loss, [v]))
        optimizer.apply_gradients(zip(gradients, [v], strict=True))

    run = tf.function(step) if mode == "function" else step
    expected = np.float32([1, 2])
    for i in range(2 * size):
        bad = i % 2 == 1
        run(tf.constant([np.inf if bad and rank == i // 2 else 1.0, 2.0]))
        if not bad:
            expected = expected - np.float32(0.05) * np.float32([1, 2])
        np.testing.assert_allclose(v, expected, rtol=1e-6)
        assert scale_of(optimizer) == 8.0 / 2 ** ((i + 1) // 2)
