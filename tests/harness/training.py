"""Small trainings whose result is known: one process that sees all ranks' samples."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

import gradred.keras as hvd
import tensorflow as tf

keras = tf.keras
KERAS_3 = int(getattr(keras, "__version__", "2").split(".")[0]) >= 3

STEPS = 5
ROWS = 12  # in a step on all ranks together


@contextmanager
def double_precision():
    """Keras takes the mean over the batch in its floatx: 1/12 in float32 is not three times 1/4."""
    before = keras.backend.floatx()
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx(before)


def data():
    generator = np.random.default_rng(3)
    x = generator.normal(size=(STEPS * ROWS, 5))
    return x, generator.normal(size=(STEPS * ROWS, 2))


def my_rows(rank, size):
    """This rank's samples: in every step a part of that step's."""
    return np.concatenate([np.arange(s * ROWS + rank, (s + 1) * ROWS, size) for s in range(STEPS)])


def net(dtype="float64", seed=7):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((5,), dtype=dtype),
            layers.Dense(8, activation="tanh", dtype=dtype),
            layers.Dense(6, activation="tanh", dtype=dtype),
            layers.Dense(2, dtype=dtype),
        ]
    )


def mse(y, p):
    return tf.reduce_mean(tf.square(tf.cast(y, p.dtype) - p))


def fit(model, optimizer, rows, batch, **options):
    x, y = data()
    model.compile(optimizer=optimizer, loss=mse, **options)
    model.fit(x[rows], y[rows], batch_size=batch, shuffle=False, verbose=0)


def loop(model, optimizer, rows, batch, mode, distributed_tape=False):
    """A custom training loop; mode: "function" or "eager"."""
    x, y = data()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        if distributed_tape:
            from gradred.tensorflow import DistributedGradientTape

            tape = DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    run = tf.function(step) if mode == "function" else step
    for begin in range(0, len(rows), batch):
        part = rows[begin : begin + batch]
        run(tf.constant(x[part]), tf.constant(y[part]))


def steps_of(optimizer):
    """Updates it has made; the LossScaleOptimizer of early Keras 3 leaves counting to the inner."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return int(tf.convert_to_tensor(inner.iterations))


def weights(model):
    return [w.copy() for w in model.get_weights()]


def assert_close(got, expected, tolerance):
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=tolerance, atol=tolerance)


def assert_same_on_all_ranks(values, name="weights"):
    flat = np.concatenate([np.ravel(v).astype(np.float64) for v in values])
    low = hvd.allreduce(flat, name=f"{name}.low", op=hvd.Min)
    np.testing.assert_array_equal(low, flat)


def scale_of(optimizer):
    """The current scale of a LossScaleOptimizer; None of another optimizer."""
    if not isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        return None
    value = optimizer.dynamic_scale if KERAS_3 else optimizer.loss_scale
    return float(tf.convert_to_tensor(value))


def scaled(optimizer, loss):
    return optimizer.scale_loss(loss) if KERAS_3 else optimizer.get_scaled_loss(loss)


def unscaled(optimizer, gradients):
    """Keras 3 does it when it applies them."""
    return gradients if KERAS_3 else optimizer.get_unscaled_gradients(gradients)
