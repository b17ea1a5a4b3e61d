"""S12: batch normalization with the statistics of all ranks' samples."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from harness.training import (
    KERAS_3,
    assert_close,
    assert_same_on_all_ranks,
    double_precision,
    keras,
)

pytestmark = [pytest.mark.ranks(2, deadline=120), pytest.mark.smoke]
three = pytest.mark.ranks(2, 3, deadline=120)

BatchNormalization = keras.layers.BatchNormalization
if not KERAS_3:  # its fused kernel keeps another variance
    BatchNormalization = lambda **options: keras.layers.BatchNormalization(  # noqa: E731
        fused=False, **options
    )

# Rows of each rank; the first ranks' in smaller jobs.
ROWS = {"equal": (4, 4, 4), "unequal": (1, 6, 3), "an empty batch": (5, 0, 2)}


@pytest.fixture(autouse=True)
def double():
    with double_precision():
        yield


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def mine(rows, rank):
    """The slice of the joined batch that is this rank's."""
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def step(layer, x, weights, mode="eager", **options):
    """Output, and derivatives of the sum of squares, weighted, by x, gamma and beta."""

    def run(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, **options)
            loss = tf.reduce_sum(tf.square(y) * weights) + tf.reduce_sum(y * y * y)
        return y, tape.gradient(loss, [x, *layer.trainable_variables])

    run = tf.function(run) if mode == "function" else run
    y, gradients = run(tf.constant(x), tf.constant(weights))
    return y.numpy(), [g.numpy() for g in gradients]


def moving(layer):
    return [np.asarray(tf.convert_to_tensor(v)) for v in layer.non_trainable_variables]


@three
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize(
    ("shape", "axis", "rows"),
    [
        ((3,), -1, "unequal"),
        ((3,), -1, "an empty batch"),
        ((2, 5, 3), -1, "an empty batch"),
        ((3, 2, 5), 1, "unequal"),
        ((2, 5, 3), -1, "equal"),
    ],
)
def test_as_one_process_with_the_joined_batch(shape, axis, rows, mode, rank, size):
    rows = ROWS[rows][:size]
    part = mine(rows, rank)
    alone = BatchNormalization(axis=axis, momentum=0.75, dtype="float64")
    together = hvd.SyncBatchNormalization(axis=axis, momentum=0.75, dtype="float64")
    for i in range(2):
        x = 3.0 + 2.0 * numbers(sum(rows), *shape, seed=i)
        weights = numbers(sum(rows), *shape, seed=9)
        y, (dx, *dp) = step(alone, x, weights, mode)
        got, (got_dx, *got_dp) = step(together, x[part], weights[part], mode)
        assert_close([got, got_dx], [y[part], dx[part]], 1e-12)
        summed = [hvd.allreduce(g, op=hvd.Sum, name=f"p{j}") for j, g in enumerate(got_dp)]
        assert_close(summed, dp, 1e-11)
        assert_close(moving(together), moving(alone), 1e-12)
        assert_same_on_all_ranks(moving(together))


@three
def test_second_derivatives(rank, size):
    """The gradient's norm by the inputs."""
    rows = ROWS["unequal"][:size]
    part = mine(rows, rank)
    x, weights = numbers(sum(rows), 4), numbers(sum(rows), 4, seed=1)

    def second(layer, x, weights):
        x, weights = tf.constant(x), tf.constant(weights)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.square(layer(x, training=True)) * weights)
            norm = tf.reduce_sum(tf.square(inner.gradient(loss, x)))
        return outer.gradient(norm, x).numpy()

    expected = second(BatchNormalization(dtype="float64"), x, weights)
    got = second(hvd.SyncBatchNormalization(dtype="float64"), x[part], weights[part])
    assert_close([got], [expected[part]], 1e-11)


@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"),
    [
        # Rounding to float32 alone changes this variance by 8e-4 of it; E[x^2] - E[x]^2 in float32
        # has no digit of it. Expected: some roundings of float64, 2^-53 (mean / deviation)^2.
        ("float32", 1e4, 5e-4),
        ("float32", 1e2, 1e-5),
        ("float64", 1e8, 1e-12),
    ],
)
def test_small_deviations_of_a_large_mean(dtype, mean, tolerance, rank, size):
    rows = (40, 10, 70)[:size]
    x = (mean + 1e-2 * numbers(sum(rows), 64, 2)).astype(dtype)
    weights = numbers(*x.shape, seed=3).astype(dtype)
    options = {"epsilon": 1e-9, "momentum": 0.0}
    part = mine(rows, rank)
    layer = hvd.SyncBatchNormalization(dtype=dtype, **options)
    y, (dx, *_) = step(layer, x[part], weights[part])
    # Shifted by what is exact, so that the reference loses nothing.
    exact = (x - x.dtype.type(mean)).astype(np.float64)
    reference = BatchNormalization(dtype="float64", **options)
    expected, (expected_dx, *_) = step(reference, exact, weights.astype(np.float64))
    got_mean, got_variance = moving(layer)
    precision = np.finfo(dtype).eps
    np.testing.assert_allclose(got_mean, mean + exact.mean((0, 1)), rtol=precision)
    np.testing.assert_allclose(got_variance, exact.var((0, 1)), rtol=tolerance)
    np.testing.assert_allclose(y, expected[part], rtol=tolerance, atol=tolerance)
    scale = np.abs(expected_dx).max()
    np.testing.assert_allclose(dx, expected_dx[part], atol=tolerance * scale)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_halves(policy, rank, size):
    """Sums of squares beyond the range of float16; statistics as in float32."""
    rows = (30, 8, 21)[:size]
    short = tf.as_dtype(policy.removeprefix("mixed_"))
    x = tf.cast(600.0 + 40.0 * numbers(sum(rows), 33, 2), short)
    layer = hvd.SyncBatchNormalization(momentum=0.0, dtype=policy)
    y = layer(x[mine(rows, rank)], training=True)
    assert y.dtype == short
    exact = tf.cast(x, tf.float64).numpy()
    mean, variance = exact.mean((0, 1)), exact.var((0, 1))
    assert_close(moving(layer), [mean, variance], 1e-5)
    expected = ((exact - mean) / np.sqrt(variance + 1e-3))[mine(rows, rank)]
    digits = 2.0 ** (-11 if short == tf.float16 else -8)
    np.testing.assert_allclose(tf.cast(y, tf.float64), expected, rtol=1.01 * digits, atol=1e-4)


@three
def test_masks(rank, size):
    rows, length = ROWS["unequal"][:size], 5
    x = numbers(sum(rows), length, 3)
    mask = numbers(sum(rows), length, seed=4) > 0.3
    mask[mine(rows, 0)] = False  # a rank without an element that counts
    x[~mask] = np.nan
    counted = x[mask]
    layer = hvd.SyncBatchNormalization(momentum=0.0, dtype="float64", epsilon=1e-3)
    part = mine(rows, rank)
    y = layer(x[part], training=True, mask=mask[part]).numpy()
    mean, variance = counted.mean(0), counted.var(0)
    assert_close(moving(layer), [mean, variance], 1e-12)
    expected = (x - mean) / np.sqrt(variance + 1e-3)
    assert_close([y[mask[part]]], [expected[part][mask[part]]], 1e-12)
    with pytest.raises(gradred.InvalidArgument, match="without the last dimension"):
        layer(x[part], training=True, mask=mask[part][:, 0])


def test_gradients_with_masks(rank, size):
    rows, length = ROWS["unequal"][:size], 4
    mask = np.arange(length) < np.array([[1 + i % length] for i in range(sum(rows))])
    x = np.where(mask[..., np.newaxis], numbers(sum(rows), length, 2), 1e3)
    weights = np.where(mask[..., np.newaxis], numbers(sum(rows), length, 2, seed=5), 0.0)

    def gradient(layer, x, weights, **options):
        x = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, **options)
            loss = tf.reduce_sum(tf.square(y) * weights)
        return tape.gradient(loss, x).numpy()

    # The elements that count, as a batch without a mask.
    joined = gradient(BatchNormalization(dtype="float64"), x[mask], weights[mask])
    part = mine(rows, rank)
    layer = hvd.SyncBatchNormalization(dtype="float64")
    got = gradient(layer, x[part], weights[part], mask=mask[part])
    expected = np.zeros_like(x)
    expected[mask] = joined
    assert_close([got[mask[part]]], [expected[part][mask[part]]], 1e-12)


def test_number_of_reductions(rank, size):
    """One forward, one back; none where the layer is frozen or does not train."""
    layer = hvd.SyncBatchNormalization(dtype="float32")
    x = numbers(4, 3).astype(np.float32)
    step(layer, x, x)
    before = gradred.metrics().batches
    step(layer, x, x)
    assert gradred.metrics().batches - before == 2
    if rank == 0:  # alone
        layer(x, training=False)
        layer(x)
        layer.trainable = False
        layer(x, training=True)
    assert gradred.metrics().batches - before == 2


def test_no_rank_has_a_sample(rank, size):
    layer = hvd.SyncBatchNormalization(dtype="float32")
    layer(numbers(4, 3), training=True)
    before = moving(layer)
    assert layer(numbers(0, 3), training=True).shape == (0, 3)
    assert_close(moving(layer), before, 0)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 does not switch XLA on by itself")
def test_no_xla(rank, size):
    model = net(hvd.SyncBatchNormalization)
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile("sgd", loss="mse", jit_compile=True)
    assert not model.jit_compile


@pytest.mark.skipif(KERAS_3, reason="graphs that serve both are Keras 2's")
def test_training_that_a_session_decides(rank, size):
    rows = ROWS["unequal"][:size]
    x = numbers(sum(rows), 3)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        layer = hvd.SyncBatchNormalization(momentum=0.0, epsilon=0.0, dtype="float64")
        training = tf.compat.v1.placeholder(tf.bool, [])
        y = layer(tf.constant(x[mine(rows, rank)]), training=training)
        session.run(tf.compat.v1.global_variables_initializer())
        expected = ((x - x.mean(0)) / x.std(0))[mine(rows, rank)]
        assert_close([session.run(y, {training: False})], [x[mine(rows, rank)]], 1e-12)
        for decided in (True, False):  # the second with the moving statistics of the first
            assert_close([session.run(y, {training: decided})], [expected], 1e-6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"fused": True}, gradred.InvalidArgument),
        ({"fused": None}, gradred.InvalidArgument),
        ({"renorm": True}, gradred.Unsupported),
        ({"virtual_batch_size": 2}, gradred.Unsupported),
    ],
)
def test_refused(options, error):
    with pytest.raises(error, match=next(iter(options))):
        hvd.SyncBatchNormalization(**options)


@pytest.mark.ranks(3)
def test_process_sets(rank, size):
    some = hvd.add_process_set([0, 2])
    x = numbers(9, 3)
    layer = hvd.SyncBatchNormalization(process_set=some, momentum=0.0, dtype="float64")
    if rank == 1:
        with pytest.raises(gradred.InvalidArgument, match="rank 1 is no member"):
            layer(x, training=True)
    else:
        layer(x[mine((3, 3, 3), rank)], training=True)
        joined = np.delete(x, slice(3, 6), 0)
        assert_close(moving(layer), [joined.mean(0), joined.var(0)], 1e-12)
    again = hvd.SyncBatchNormalization.from_config(layer.get_config())
    assert again.process_set.ranks == [0, 2]
    with pytest.raises(gradred.InvalidArgument, match=r"\[0, 2\] is not registered"):
        again(x, training=True)


def net(normalization):
    keras.utils.set_random_seed(5)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6, 6, 1), dtype="float64"),
            layers.Conv2D(4, 3, dtype="float64"),
            normalization(momentum=0.5, dtype="float64"),
            layers.Activation("tanh", dtype="float64"),
            layers.GlobalAveragePooling2D(dtype="float64"),
            normalization(momentum=0.5, dtype="float64"),
            layers.Dense(2, dtype="float64"),
        ]
    )


def test_fit_and_files(rank, size, shared_dir):
    """Equal to one process; a model that was saved and loaded goes on as the one that was not."""
    rows = 4 * size
    x, y = numbers(3 * rows, 6, 6, 1), numbers(3 * rows, 2)
    here = np.concatenate([np.arange(s * rows + rank, (s + 1) * rows, size) for s in range(3)])

    def train(model, which):
        batch = len(which) // 3
        model.fit(x[which], y[which], batch_size=batch, shuffle=False, verbose=0)

    alone, together = net(BatchNormalization), net(hvd.SyncBatchNormalization)
    alone.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    together.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    train(alone, np.arange(3 * rows))
    train(together, here)
    assert_close(together.get_weights(), alone.get_weights(), 1e-11)
    assert_same_on_all_ranks(together.get_weights())
    path = str(shared_dir / "model.keras")
    if rank == 0:
        together.save(path)
    hvd.barrier()
    loaded = hvd.load_model(path)
    assert type(loaded.layers[1]) is hvd.SyncBatchNormalization
    for model in (together, loaded):
        train(model, here)
    assert_close(loaded.get_weights(), together.get_weights(), 0)
    plain = keras.models.load_model(
        path, custom_objects={"gradred>SyncBatchNormalization": keras.layers.BatchNormalization}
    )
    assert_close([plain.predict(x, verbose=0)], [alone.predict(x, verbose=0)], 1e-9)
