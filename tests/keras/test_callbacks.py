"""Callbacks of fit."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from gradred.errors import Mismatch
from gradred.keras import averages
from harness.training import (
    KERAS_3,
    ROWS,
    assert_close,
    assert_same_on_all_ranks,
    data,
    fit,
    keras,
    mse,
    my_rows,
    net,
    weights,
)

pytestmark = [pytest.mark.ranks(2, deadline=120), pytest.mark.smoke]
three = pytest.mark.ranks(2, 3, deadline=120)

O, C = keras.optimizers, keras.callbacks  # noqa: E741


@three
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


def test_random_states_are_left_alone(rank, size):
    """Ranks that drop the same units see less of their samples' variety."""
    if not KERAS_3:
        pytest.skip("the states are no variables of Keras 2's models")
    keras.utils.set_random_seed(rank)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)],
    )
    model.compile(optimizer=hvd.DistributedOptimizer(O.SGD(0.1)), loss=mse)
    before = [v.numpy() for v in model.layers[0].variables]
    x, y = data()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x[:4], y[:4], batch_size=4, verbose=0, callbacks=[callback])
    assert_same_on_all_ranks(weights(model))
    seeds = gradred.allgather_object(before)
    assert not np.array_equal(seeds[0], seeds[1])


@three
def test_metrics_are_those_of_the_joined_data(rank, size):
    """Ranks count by their samples, in training and in validation."""
    x, y = data()
    rows, tested = (16, 8, 12)[rank], (4, 28, 8)[rank]
    model = net(seed=1)
    metrics = ["mae", keras.metrics.RootMeanSquaredError(name="rmse")]
    model.compile(optimizer=O.SGD(0.0), loss="mse", metrics=metrics)
    everyone = gradred.allgather_object((x[rank : rank + rows], x[rank : rank + tested]))
    truth = gradred.allgather_object((y[rank : rank + rows], y[rank : rank + tested]))
    expected = {}
    for i, prefix in enumerate(("", "val_")):
        joined = [np.concatenate([part[i] for part in parts]) for parts in (everyone, truth)]
        values = model.evaluate(*joined, batch_size=4, verbose=0, return_dict=True)
        expected.update({prefix + name: value for name, value in values.items()})
    history = model.fit(
        *(x[rank : rank + rows], y[rank : rank + rows]),
        batch_size=4,
        epochs=2,
        validation_freq=2,
        validation_data=(x[rank : rank + tested], y[rank : rank + tested]),
        verbose=0,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    ).history
    for name in ("loss", "mae", "val_loss", "val_mae"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-6)
    seen = gradred.allgather_object(history)
    assert all(other == seen[0] for other in seen)


class Say(keras.callbacks.Callback):
    """Puts numbers into the logs of epochs: this rank's by name, a list by epoch."""

    def __init__(self, **numbers):
        super().__init__()
        self.numbers = numbers

    def on_epoch_end(self, epoch, logs=None):
        for name, values in self.numbers.items():
            logs[name] = values[epoch]


def run(callbacks, rank=0, rows=4, epochs=6, rate=0.0, **options):
    x, y = data()
    model = net("float32", seed=1)
    model.compile(optimizer=hvd.DistributedOptimizer(O.SGD(rate)), loss=mse, **options)
    return model, model.fit(
        *(x[:rows], y[:rows]),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


@three
def test_metrics_of_some_ranks(rank, size):
    """A validation on one rank alone, names in another order, texts and arrays."""
    x, y = data()
    say = {"a": [1.0 + rank], "b": [2.0], "text": ["x"], "list": [np.ones(2)]}
    if rank == 1:
        say = dict(reversed(say.items()), mine=[7.0])
    model = net("float32", seed=1)
    model.compile(optimizer=O.SGD(0.0), loss="mse")
    history = model.fit(
        *(x[:8], y[:8]),
        verbose=0,
        validation_data=(x, y) if rank == 0 else None,
        callbacks=[Say(**say), hvd.callbacks.MetricAverageCallback()],
    ).history
    assert history["a"] == [1.0 + (size - 1) / 2]
    assert history["b"] == [2.0] and history["text"] == ["x"] and history["mine"] == [7.0]
    assert history["val_loss"] == gradred.broadcast_object(history["val_loss"])


@three
@pytest.mark.parametrize("what", ["learning rate", "end of training"])
def test_what_ranks_decided_by_metrics_of_their_own(what, rank, size, job):
    """Not in silence: callbacks that read metrics stand in front of the one that averages them."""
    if what == "learning rate":
        alone = C.ReduceLROnPlateau(monitor="score", mode="min", patience=1, factor=0.5)
    else:
        alone = C.EarlyStopping(monitor="score", mode="min", patience=1)
    say = Say(score=[2.0, 3.0 if rank == 1 else 1.0])
    with pytest.raises(Mismatch) as caught:
        run([say, alone, hvd.callbacks.MetricAverageCallback()], epochs=2, rate=0.125)
    assert len(set(job.exchange(str(caught.value)))) == 1
    mine, other = ("0.125", "0.0625") if what == "learning rate" else ("later", "now")
    usual = "rank 0" if size == 2 else "ranks 0, 2"
    assert f"process set 0: the {what} is {mine} on {usual}, {other}" in str(caught.value)


def test_schedules_are_not_compared():
    """A schedule of Keras 2 has an address in its text, which differs between ranks."""
    rates = [lambda step: 0.1, lambda step: 0.1]
    models = [SimpleNamespace(optimizer=SimpleNamespace(learning_rate=rate)) for rate in rates]
    assert averages._decided(models[0]) == averages._decided(models[1])


@three
def test_all_ranks_stop_early_together(rank, size):
    """Each rank alone would stop at another epoch; the average is best in epoch 2."""
    average = [5.0, 4.0, 1.0, 2.0, 3.0, 4.0]
    apart = np.linspace(-1, 1, size)[rank] * np.array([9, 3, -5, 1, 7, 0])
    kept = []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kept.append(weights(self.model))

    stop = hvd.callbacks.EarlyStopping(
        monitor="val_score", mode="min", patience=2, restore_best_weights=True
    )
    say = Say(val_score=np.array(average) + apart)
    model, history = run([say, Keep(), stop], rate=0.1)
    assert stop.stopped_epoch == 4 and len(history.epoch) == 5
    assert stop.best == 1.0
    for a, b in zip(weights(model), kept[2], strict=True):
        np.testing.assert_array_equal(a, b)
    assert_same_on_all_ranks(weights(model))


@three
@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_model(mode, rank, size, shared_dir):
    sign = 1.0 if mode == "min" else -1.0
    average = sign * np.array([5.0, 2.0, 3.0, 4.0])
    apart = np.linspace(-1, 1, size)[rank] * np.array([0.0, 4.0, -8.0, 0.0])
    kept = []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kept.append(weights(self.model))

    best = hvd.callbacks.BestModelCheckpoint(monitor="val_score", mode=mode)
    best.filepath = str(shared_dir / f"best-{rank}.keras")
    run([Say(val_score=average + apart), Keep(), best], epochs=4, rate=0.1)
    assert best.best == sign * 2.0  # on all ranks
    gradred.barrier()
    assert [path.name for path in shared_dir.iterdir()] == ["best-0.keras"]
    loaded = keras.models.load_model(shared_dir / "best-0.keras", compile=False)
    for a, b in zip(loaded.get_weights(), kept[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("weights_only", [False, True])
def test_best_model_by_batches(weights_only, rank, size, shared_dir):
    ending = ".weights.h5" if weights_only else ".keras"
    best = hvd.callbacks.BestModelCheckpoint("loss", save_weights_only=weights_only, save_freq=2)
    best.filepath = str(shared_dir / f"{rank}-{{batch}}{ending}")
    run([best], rows=16, epochs=1, rate=0.1)
    gradred.barrier()
    assert [path.name for path in shared_dir.iterdir()] == [f"0-2{ending}"]
    assert len(set(gradred.allgather_object(best.best))) == 1


def test_best_model_that_cannot_be_written(rank, size):
    best = hvd.callbacks.BestModelCheckpoint("loss")
    if rank == 0:
        best.filepath = "/dev/null/best.keras"
    error, text = (OSError, "null") if rank == 0 else (gradred.Abandoned, "rank 0 could not write")
    with pytest.raises(error, match=text):
        run([best])
    if rank == 0:
        best.filepath = None
        with pytest.raises(gradred.InvalidArgument, match="filepath is not set"):
            best.on_train_begin()


def test_a_checkpoint_that_takes_long(rank, size, shared_dir, monkeypatch, caplog):
    """H20: the others wait, and say for whom."""

    class Slow(hvd.callbacks.BestModelCheckpoint):
        def _writes(self):
            if rank == 0:
                time.sleep(2.5)
            return super()._writes()

    gradred.shutdown()
    monkeypatch.setenv("GRADRED_STALL_WARN_SECONDS", "1")
    gradred.init()
    try:
        slow = Slow("loss", filepath=str(shared_dir / "model.keras"))
        run([slow], epochs=1, rate=0.1)
    finally:
        gradred.shutdown()
        monkeypatch.delenv("GRADRED_STALL_WARN_SECONDS")
        gradred.init()
    texts = [r.getMessage() for r in caplog.records if "BestModelCheckpoint" in r.getMessage()]
    everyone = gradred.allgather_object(texts)
    assert any("rank 0" in text for texts in everyone for text in texts), everyone


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("kind", ["array", "number", "tensor", "variable"])
def test_values(kind, mode, rank, size):
    """What Horovod turns into a constant first, which a symbolic tensor cannot be."""
    value = np.array([rank + 1.0, 2.0], np.float32)
    if kind == "number":
        value = float(rank + 1)
    elif kind != "array":
        value = {"tensor": tf.constant, "variable": keras.Variable if KERAS_3 else tf.Variable}[
            kind
        ](value)

    def use(value):
        rows = tf.reshape(tf.convert_to_tensor(value), [-1])
        return (
            hvd.allreduce(value, op=hvd.Sum, name="a"),
            hvd.allreduce(value, average=True, prescale_factor=0.5, postscale_factor=4.0),
            hvd.broadcast(value, size - 1, name="b"),
            hvd.allgather(rows if mode == "function" else rows.numpy(), name="g"),
            hvd.reducescatter(tf.repeat(rows, size), op=hvd.Sum, name="s"),
        )

    if mode == "function":
        value = value if kind == "variable" else tf.convert_to_tensor(value)
        run = tf.function(lambda: use(value) if kind == "variable" else None)
        results = run() if kind == "variable" else tf.function(use)(value)
        assert all(isinstance(r, tf.Tensor) for r in results)
    else:
        results = use(value)
        assert all(isinstance(r, np.ndarray | np.generic) for r in results)
    mine = np.array([rank + 1.0] if kind == "number" else [rank + 1.0, 2.0])
    total = np.array([size * (size + 1) / 2, 2.0 * size])[: len(mine)]
    assert_close([np.ravel(results[0])], [total], 0)
    assert_close([np.ravel(results[1])], [2 * total / size], 1e-6)
    assert_close([np.ravel(results[2])], [np.array([size, 2.0])[: len(mine)]], 0)
    ranks = np.arange(1.0, size + 1)
    everyone = np.stack([ranks, np.full(size, 2.0)], 1)[:, : len(mine)]
    assert_close([results[3]], [np.ravel(everyone)], 0)
    share = np.array_split(np.repeat(total, size), size)[rank]
    assert_close([results[4]], [share], 0)
