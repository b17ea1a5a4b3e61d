"""Callbacks of fit."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from harness.training import (
    ROWS,
    assert_same_on_all_ranks,
    data,
    fit,
    keras,
    mse,
    my_rows,
    net,
    weights,
)

pytestmark = [pytest.mark.ranks(2, 3, deadline=120), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741


@pytest.mark.parametrize("resumes", [False, True])
def test_broadcast_at_the_beginning(resumes, rank, size):
    """All ranks train from the root's weights and slots, also if the root alone has stepped."""
    root = size - 1
    x, y = data()
    rows = my_rows(rank, size)
    model = net(seed=rank)
    optimizer = O.Adam(0.01)
    if resumes and rank == root:
        fit(model, optimizer, np.arange(2 * ROWS), ROWS)
    hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss=mse)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    model.fit(
        *(x[rows], y[rows]),
        batch_size=ROWS // size,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
    )
    assert_same_on_all_ranks(weights(model))
    state = optimizer.variables
    state = [np.asarray(tf.convert_to_tensor(v)) for v in (state() if callable(state) else state)]
    assert_same_on_all_ranks(state, "state")
    steps = int(tf.convert_to_tensor(optimizer.iterations))
    assert steps == (7 if resumes else 5)


def test_local_variables_are_left_alone(rank, size):
    model = net(seed=rank)
    kept = model.trainable_variables[0]
    value = kept.numpy().copy()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kept])
    model.compile(optimizer=O.SGD(0.0), loss=mse)
    x, y = data()
    model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=[callback])
    np.testing.assert_array_equal(kept.numpy(), value)
    assert_same_on_all_ranks(weights(model)[1:])


def test_metrics_are_averaged(rank, size):
    x, y = data()
    model = net(seed=1)
    model.compile(optimizer=O.SGD(0.0), loss=mse)
    rows = my_rows(rank, size)
    local = float(model.evaluate(x[rows], y[rows], batch_size=60, verbose=0))
    history = model.fit(
        *(x[rows], y[rows]),
        batch_size=60,
        validation_data=(x[rows], y[rows]),
        verbose=0,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    ).history
    mean = float(gradred.allreduce(np.float64(local), name="mean"))
    assert history["loss"][0] == pytest.approx(mean, rel=1e-6)
    assert history["val_loss"][0] == pytest.approx(mean, rel=1e-6)


def test_values(rank, size):
    assert hvd.allreduce(float(rank + 1), op=hvd.Sum) == size * (size + 1) / 2
    np.testing.assert_array_equal(hvd.allgather([rank]), np.arange(size))
    assert hvd.broadcast(rank, size - 1) == size - 1
