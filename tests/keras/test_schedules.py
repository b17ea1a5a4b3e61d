"""H11: callbacks that change the learning rate, with momentum."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from harness.training import KERAS_3, assert_close, keras

pytestmark = [pytest.mark.ranks(2, deadline=120), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741
STEPS, EPOCHS = 4, 3
RATE = 0.125

OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.03125, momentum=0.5),
    "nesterov": lambda: O.SGD(0.03125, momentum=0.5, nesterov=True),
    "scaled": lambda: keras.mixed_precision.LossScaleOptimizer(
        O.SGD(0.03125, momentum=0.5), initial_scale=8.0
    ),
}
if not KERAS_3:
    OPTIMIZERS["legacy"] = lambda: O.legacy.SGD(0.03125, momentum=0.5)
    OPTIMIZERS["legacy nesterov"] = lambda: O.legacy.SGD(0.03125, momentum=0.5, nesterov=True)


class Rates(keras.callbacks.Callback):
    """What the learning rate was in each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(tf.convert_to_tensor(self.model.optimizer.learning_rate)))


def train(rank, size, optimizer, callbacks, epochs=EPOCHS, **options):
    """A weight whose gradient is the mean of the samples; returns its value and the rates."""
    # Samples of all ranks: their mean in step s is s + 1.
    x = np.arange(1.0, STEPS + 1) + (rank - (size - 1) / 2)
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss=lambda _, p: tf.reduce_mean(p), **options)
    rates = Rates()
    x = x.astype(np.float32)[:, np.newaxis]
    history = model.fit(
        *(x, x),
        batch_size=1,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, rates],
    ).history
    return float(model.get_weights()[0][0, 0]), rates.seen, history


def expected(rates, nesterov=False):
    """u = m u + g with steps of rate * u."""
    w, u = 0.0, 0.0
    for step, rate in enumerate(rates):
        g = 1.0 + step % STEPS
        u = 0.5 * u + g
        w -= rate * (0.5 * u + g if nesterov else u)
    return w


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_warm_up(name, rank, size):
    callback = hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=2, verbose=rank == 0)
    w, rates, history = train(rank, size, OPTIMIZERS[name](), [callback])
    steps = np.minimum(np.arange(1, EPOCHS * STEPS + 1) / (2 * STEPS), 1.0)
    assert_close([rates], [RATE * (1 + steps * (size - 1)) / size], 1e-6)
    assert w == pytest.approx(expected(rates, "nesterov" in name), rel=1e-5)
    assert_close([history["lr"]], [rates[STEPS - 1 :: STEPS]], 1e-7)


def test_a_part_of_an_epoch(rank, size):
    callback = hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=0.5)
    _, rates, _ = train(rank, size, O.Adam(RATE), [callback], epochs=1)
    steps = np.minimum(np.arange(1, STEPS + 1) / (STEPS / 2), 1.0)
    assert_close([rates], [RATE * (1 + steps * (size - 1)) / size], 1e-6)


@pytest.mark.parametrize("eager", [False, True])
def test_schedules_one_after_the_other(eager, rank, size):
    schedule = hvd.callbacks.LearningRateScheduleCallback
    callbacks = [
        schedule(RATE, 2.0, end_epoch=1),
        schedule(RATE, lambda epoch: 0.5**epoch, start_epoch=1),
    ]
    w, rates, _ = train(rank, size, OPTIMIZERS["SGD"](), callbacks, run_eagerly=eager)
    assert rates == [2 * RATE] * STEPS + [RATE / 2] * STEPS + [RATE / 4] * STEPS
    assert w == pytest.approx(expected(rates), rel=1e-5)


def test_without_correction(rank, size):
    callback = hvd.callbacks.LearningRateScheduleCallback(
        RATE, lambda epoch: 1.0 - epoch / 4, staircase=False, momentum_correction=False
    )
    w, rates, _ = train(rank, size, OPTIMIZERS["SGD"](), [callback])
    assert rates == [RATE * (1 - s / STEPS / 4) for s in range(EPOCHS * STEPS)]
    value, velocity = 0.0, 0.0
    for step, rate in enumerate(rates):
        velocity = 0.5 * velocity - rate * (1.0 + step % STEPS)
        value += velocity
    assert w == pytest.approx(value, rel=1e-5)


def test_optimizers_whose_state_has_no_rate_in_it(rank, size):
    """Adam's moments stay as they are; RMSprop's momentum is past steps, as SGD's is."""
    schedule = hvd.callbacks.LearningRateScheduleCallback
    results = []
    for correct in (False, True):
        callback = schedule(RATE, lambda epoch: 0.5**epoch, momentum_correction=correct)
        results.append(train(rank, size, O.Adam(RATE), [callback])[0])
    assert results[0] == results[1]
    # A step without momentum: the last velocity is what a rate of its own would have made.
    halves = schedule(RATE, lambda epoch: 0.5**epoch)
    w, rates, _ = train(rank, size, O.RMSprop(RATE, momentum=0.5), [halves], epochs=2)
    kept, fixed, _ = train(rank, size, O.RMSprop(RATE, momentum=0.5), [], epochs=1)
    longer, _, _ = train(rank, size, O.RMSprop(RATE, momentum=0.5), [], epochs=2)
    assert fixed == [RATE] * STEPS and rates == [RATE] * STEPS + [RATE / 2] * STEPS
    assert w - kept == pytest.approx((longer - kept) / 2, rel=1e-5)


def test_zero_and_back(rank, size):
    """Also where another callback goes on: momentum is there still, for the rate before 0."""
    schedule = hvd.callbacks.LearningRateScheduleCallback
    callbacks = [
        schedule(RATE, lambda epoch: 1.0 - epoch, end_epoch=2),
        schedule(RATE, 2.0, start_epoch=2),
    ]
    w, rates, _ = train(rank, size, OPTIMIZERS["SGD"](), callbacks)
    assert rates == [RATE] * STEPS + [0.0] * STEPS + [2 * RATE] * STEPS
    value, velocity = 0.0, 0.0
    for step, rate in enumerate(rates):
        velocity *= 2.0 if step == 2 * STEPS else 1.0
        velocity = 0.5 * velocity - rate * (1.0 + step % STEPS)
        value += velocity
    assert w == pytest.approx(value, rel=1e-5)


def test_refused(rank, size):
    schedule, warm_up = (
        hvd.callbacks.LearningRateScheduleCallback,
        hvd.callbacks.LearningRateWarmupCallback,
    )
    with pytest.raises(gradred.InvalidArgument, match="initial_lr"):
        schedule(None, 1.0)
    decay = O.schedules.ExponentialDecay(0.1, 2, 0.5)
    with pytest.raises(gradred.InvalidArgument, match="is a ExponentialDecay: expected a number"):
        train(rank, size, O.SGD(decay), [schedule(0.1, 1.0)])
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(O.SGD(0.1), loss="mse")
    endless = tf.data.Dataset.from_tensor_slices((np.ones((4, 1)), np.ones((4, 1)))).batch(1)
    endless = endless.filter(lambda x, y: True)  # of a length that is not known
    with pytest.raises(gradred.InvalidArgument, match="steps_per_epoch=None"):
        model.fit(endless, verbose=0, callbacks=[warm_up(0.1)])
    model.fit(endless, verbose=0, callbacks=[warm_up(0.1, steps_per_epoch=4)])
