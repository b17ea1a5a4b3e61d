"""What wrapping keeps, refuses and writes to files."""

from __future__ import annotations

import json
import sys
import zipfile

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from gradred.errors import InvalidArgument, Unsupported
from harness.training import (
    KERAS_3,
    ROWS,
    STEPS,
    assert_close,
    data,
    double_precision,
    fit,
    keras,
    mse,
    my_rows,
    net,
    steps_of,
    weights,
)

pytestmark = [pytest.mark.ranks(2, deadline=120), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741
ALL = np.arange(STEPS * ROWS)


@pytest.fixture(autouse=True, scope="module")
def double():
    with double_precision():
        yield


def test_an_optimizer_that_has_stepped(rank, size):
    """S11: also when its model holds a step that was traced before."""
    alone, together = net(), net()
    for model in (alone, together):
        fit(model, O.Adam(0.01), ALL, ROWS)
    optimizer = together.optimizer
    kind = type(optimizer)
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert steps_of(optimizer) == STEPS
    assert isinstance(optimizer, kind)
    assert (type(optimizer).__name__, type(optimizer).__module__) == (
        kind.__name__,
        kind.__module__,
    )
    x, y = data()
    alone.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    rows = my_rows(rank, size)
    before = gradred.metrics().batches
    together.fit(x[rows], y[rows], batch_size=ROWS // size, shuffle=False, verbose=0)
    assert gradred.metrics().batches - before == STEPS
    assert steps_of(optimizer) == 2 * STEPS
    assert_close(weights(together), weights(alone), 1e-12)


def test_wrapping_twice_is_refused():
    """H9"""
    optimizer = hvd.DistributedOptimizer(O.SGD(0.1))
    with pytest.raises(InvalidArgument, match="SGD is distributed already"):
        hvd.DistributedOptimizer(optimizer)
    scaled = keras.mixed_precision.LossScaleOptimizer(hvd.DistributedOptimizer(O.SGD(0.1)))
    with pytest.raises(InvalidArgument, match="already"):
        hvd.DistributedOptimizer(scaled)


@pytest.mark.parametrize("thing", [None, 3, "sgd", object(), O.SGD, net])
def test_what_is_no_optimizer_is_refused_by_type(thing):
    with pytest.raises(InvalidArgument, match="expected an optimizer of Keras") as caught:
        hvd.DistributedOptimizer(thing)
    name = "SGD" if thing is O.SGD else "sgd" if thing == "sgd" else type(thing).__name__
    assert name in str(caught.value)


def test_bad_options():
    for options, kind, text in (
        ({"op": hvd.Adasum}, Unsupported, "Adasum"),
        ({"op": 17}, InvalidArgument, "op=17"),
        ({"backward_passes_per_step": 0}, InvalidArgument, "backward_passes_per_step=0"),
        ({"backward_passes_per_step": 1.5}, InvalidArgument, "an integer from 1"),
        ({"groups": [tf.Variable(1.0)]}, InvalidArgument, "lists of variables"),
        ({"groups": True}, InvalidArgument, "groups=True"),
        ({"process_set": [0, 1]}, InvalidArgument, "expected a ProcessSet"),
        ({"groups": -1}, InvalidArgument, "groups=-1"),
        ({"groups": "many"}, InvalidArgument, "groups='many'"),
        ({"compression": 16}, InvalidArgument, "compression=16"),
        ({"gradient_predivide_factor": 0.0}, InvalidArgument, "predivide"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, InvalidArgument, "Average"),
    ):
        optimizer = O.SGD(0.1)
        with pytest.raises(kind, match=text):
            hvd.DistributedOptimizer(optimizer, **options)
        hvd.DistributedOptimizer(optimizer)  # is as it was


def test_a_schedule_that_cannot_be_serialized(rank, size):
    """H10"""

    class Odd(O.schedules.LearningRateSchedule):
        def __init__(self, something):
            self.something = something

        def __call__(self, step):
            return 0.05 / (1.0 + tf.cast(step, tf.float32))

    alone, together = net(), net()
    fit(alone, O.SGD(Odd(object())), ALL, ROWS)
    optimizer = hvd.DistributedOptimizer(O.SGD(Odd(object())))
    fit(together, optimizer, my_rows(rank, size), ROWS // size)
    assert_close(weights(together), weights(alone), 1e-12)


@pytest.mark.skipif(not KERAS_3, reason="the .keras format")
def test_files_load_without_gradred(tmp_path, rank, size):
    """S15"""
    model = net("float32")
    fit(model, hvd.DistributedOptimizer(O.Adam(0.01)), my_rows(rank, size), ROWS // size)
    model.compile(optimizer=model.optimizer, loss="mse")
    path = str(tmp_path / "model.keras")
    model.save(path)
    config = json.loads(zipfile.ZipFile(path).read("config.json"))
    assert "gradred" not in json.dumps(config)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is O.Adam
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    hvd.DistributedOptimizer(loaded.optimizer)
    x, y = data()
    rows = my_rows(rank, size)
    for m in (model, loaded):
        m.fit(x[rows], y[rows], batch_size=ROWS // size, shuffle=False, verbose=0)
    assert_close(weights(loaded), weights(model), 0)


def test_jit_compile_is_turned_off_or_refused(rank, size):
    model = net("float32")
    optimizer = hvd.DistributedOptimizer(O.SGD(0.01))
    if KERAS_3:
        with pytest.warns(UserWarning, match="jit_compile"):
            fit(model, optimizer, my_rows(rank, size), ROWS // size, jit_compile=True)
        model.compile(optimizer=optimizer, loss=mse)
        assert not model.jit_compile
        model.compile(optimizer=O.SGD(0.01), loss=mse, jit_compile=True)
        assert model.jit_compile
    else:
        with pytest.raises(Exception, match="jit_compile"):
            fit(model, optimizer, my_rows(rank, size), ROWS // size, jit_compile=True)


def test_plan(rank, size):
    model = net()
    v = model.trainable_variables
    optimizer = hvd.DistributedOptimizer(O.SGD(0.05), name="planned", groups=[[v[0], v[1]]])
    fit(model, optimizer, my_rows(rank, size), ROWS // size)
    text = gradred.plan("optimizer:planned")
    assert "kernel" in text and "bias" in text
    with pytest.raises(InvalidArgument, match="nothing"):
        gradred.plan("nothing")


def test_v1_optimizers(rank, size):
    from gradred.tensorflow import DistributedOptimizer

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float64, [2])
        v = v1.get_variable("v", initializer=np.ones(2), use_resource=True)
        optimizer = DistributedOptimizer(v1.train.MomentumOptimizer(0.1, 0.9))
        train = optimizer.minimize(tf.reduce_sum(v * v * x), var_list=[v])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(train, {x: [1.0 + rank, 2.0]})
            result = session.run(v)
    expected, momentum = np.ones(2), np.zeros(2)
    for _ in range(3):
        momentum = 0.9 * momentum + 2 * expected * [1.0 + (size - 1) / 2, 2.0]
        expected = expected - 0.1 * momentum
    np.testing.assert_allclose(result, expected, rtol=1e-6)  # its rate is a float32


@pytest.mark.ranks(2, 3, deadline=120)
def test_a_step_of_fit_that_fails_on_one_rank(rank, size):
    """H19"""
    bad = tf.Variable(False, trainable=False)

    @tf.custom_gradient
    def fragile(x):
        def backward(cotangent):
            with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(bad), ["backward"])]):
                return tf.identity(cotangent)

        return tf.identity(x), backward

    class Fragile(keras.layers.Layer):
        def call(self, x):
            return fragile(x)

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4), Fragile(), keras.layers.Dense(2)]
    )
    fit(model, hvd.DistributedOptimizer(O.SGD(0.05)), my_rows(rank, size), ROWS // size)
    before = weights(model)
    bad.assign(rank == size - 1)
    x, y = data()
    expected = tf.errors.InvalidArgumentError if rank == size - 1 else tf.errors.AbortedError
    with pytest.raises(expected) as caught:
        model.fit(x[:ROWS], y[:ROWS], batch_size=ROWS, verbose=0)
    if rank != size - 1:
        assert f"rank {size - 1}" in str(caught.value)
    assert_close(weights(model), before, 0)
    bad.assign(False)
    model.fit(x[:ROWS], y[:ROWS], batch_size=ROWS, verbose=0)
    assert any(np.abs(a - b).max() > 0 for a, b in zip(weights(model), before, strict=True))


def test_datasets_of_unknown_length(rank, size):
    """Some versions of Keras end an epoch with a step that fails for want of data."""
    x, y = data()
    rows = my_rows(rank, size).reshape(STEPS, ROWS // size)

    def batches():
        for part in rows:
            yield x[part], y[part]

    spec = tf.TensorSpec([None, 5], tf.float64), tf.TensorSpec([None, 2], tf.float64)
    alone, together = net(), net()
    alone.compile(optimizer=O.SGD(0.05), loss=mse)
    alone.fit(x, y, batch_size=ROWS, shuffle=False, epochs=3, verbose=0)
    together.compile(optimizer=hvd.DistributedOptimizer(O.SGD(0.05)), loss=mse)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    together.fit(dataset, epochs=3, verbose=0)
    assert_close(weights(together), weights(alone), 1e-12)


def test_another_keras_backend_is_refused(monkeypatch):
    if not KERAS_3:
        pytest.skip("Keras 2 has one backend")
    monkeypatch.setattr(sys.modules["keras"].backend, "backend", lambda: "jax")
    with pytest.raises(Unsupported, match="the Keras backend is jax"):
        hvd.DistributedOptimizer(O.SGD(0.1))


@pytest.mark.ranks(2)
def test_a_gradient_that_one_rank_lacks(rank, size):
    """H21, in a custom loop and with Adam's slots."""
    for mode in (tf.function, lambda f: f):
        a, b = tf.Variable([1.0]), tf.Variable([2.0])
        optimizer = hvd.DistributedOptimizer(O.Adam(0.1))
        optimizer.build([a, b])

        def step(a=a, b=b, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(a * a)
                if rank == 0:
                    loss += tf.reduce_sum(b * b)
            gradients = tape.gradient(loss, [a, b])
            optimizer.apply_gradients(zip(gradients, [a, b], strict=True))

        run = mode(step)
        for _ in range(3):
            run()
        moved = hvd.allreduce(np.array([float(a[0]), float(b[0])]), op=hvd.Min, name="moved")
        np.testing.assert_array_equal(moved, [a[0], b[0]])
        assert b[0] < 2.0
