"""N ranks train as one process with the joined batch does. See training.py."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from harness.training import (
    KERAS_3,
    ROWS,
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    double_precision,
    fit,
    keras,
    loop,
    my_rows,
    net,
    weights,
)

pytestmark = pytest.mark.ranks(2, deadline=120)

O = keras.optimizers  # noqa: E741
ALL = np.arange(STEPS * ROWS)


@pytest.fixture(autouse=True, scope="module")
def double():
    with double_precision():
        yield


OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.05, momentum=0.9),
    "nesterov": lambda: O.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: O.Adam(0.01),
    "AdamW clipped": lambda: O.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "clipnorm": lambda: O.SGD(0.05, clipnorm=0.05),
    "RMSprop": lambda: O.RMSprop(0.01),
    "EMA": lambda: O.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "schedule": lambda: O.SGD(O.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
if KERAS_3:
    OPTIMIZERS["accumulation"] = lambda: O.SGD(0.05, gradient_accumulation_steps=2)
    OPTIMIZERS["fixed loss scale"] = lambda: O.SGD(0.05, loss_scale_factor=1024.0)


def sizes(name: str) -> pytest.MarkDecorator:
    """Averages over more than two ranks are the same for all optimizers: two show them."""
    more = (3, 4) if name in ("Adam", "AdamW clipped") else ()
    return pytest.mark.ranks(1, 2, *more, deadline=120)


@pytest.mark.smoke
@pytest.mark.parametrize("name", [pytest.param(name, marks=sizes(name)) for name in OPTIMIZERS])
def test_optimizers_in_fit(name, rank, size):
    """S1"""
    alone, together = net(), net()
    fit(alone, OPTIMIZERS[name](), ALL, ROWS)
    start = weights(together)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name]())
    before = gradred.metrics().batches
    fit(together, optimizer, my_rows(rank, size), ROWS // size)
    assert gradred.metrics().batches - before == STEPS  # each gradient once a step
    assert_close(weights(together), weights(alone), 1e-12)
    assert_same_on_all_ranks(weights(together))
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(start, weights(together), strict=True))


FIT_MODES = {
    "run_eagerly": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 3},
    "jit_compile": {"jit_compile": False},
}


@pytest.mark.smoke
@pytest.mark.parametrize("mode", list(FIT_MODES))
def test_modes_of_fit(mode, rank, size):
    alone, together = net(), net()
    fit(alone, OPTIMIZERS["SGD"](), ALL, ROWS, **FIT_MODES[mode])
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"]())
    fit(together, optimizer, my_rows(rank, size), ROWS // size, **FIT_MODES[mode])
    assert_close(weights(together), weights(alone), 1e-12)


@pytest.mark.smoke
@pytest.mark.ranks(2, 3, deadline=120)
@pytest.mark.parametrize("mode", ["function", "eager"])
@pytest.mark.parametrize("who", ["optimizer", "tape"])
def test_custom_loops(mode, who, rank, size):
    """S2: reduced by the optimizer, or by the tape, once."""
    alone, together = net(), net()
    loop(alone, OPTIMIZERS["SGD"](), ALL, ROWS, mode)
    optimizer = OPTIMIZERS["SGD"]()
    if who == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer)
    rows = my_rows(rank, size)
    loop(together, optimizer, rows, ROWS // size, mode, distributed_tape=who == "tape")
    assert_close(weights(together), weights(alone), 1e-12)


@pytest.mark.parametrize("mode", ["function", "eager"])
@pytest.mark.parametrize("clip", [False, True])
def test_tape_and_optimizer_together_are_refused(mode, clip, size):
    """S2"""
    from gradred.tensorflow import DistributedGradientTape

    v = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(O.SGD(0.1))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v)
        tape = DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [v])
        if clip:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        optimizer.apply_gradients(zip(gradients, [v], strict=True))

    run = tf.function(step, autograph=False) if mode == "function" else step
    with pytest.raises(gradred.InvalidArgument, match="use one of the two"):
        run()


@pytest.mark.parametrize(
    "options",
    [{"groups": 2}, {"groups": "layer"}, {"groups": "100B"}, {"gradient_predivide_factor": 4.0}],
    ids=str,
)
def test_options_keep_the_result(options, rank, size):
    """S4"""
    alone, together = net(), net()
    fit(alone, O.SGD(0.05), ALL, ROWS)
    optimizer = hvd.DistributedOptimizer(O.SGD(0.05), **options)
    fit(together, optimizer, my_rows(rank, size), ROWS // size)
    assert_close(weights(together), weights(alone), 1e-12)


def test_sum(rank, size):
    """S4"""
    alone, together = net(), net()
    fit(alone, O.SGD(0.05 * size), ALL, ROWS)
    optimizer = hvd.DistributedOptimizer(O.SGD(0.05), op=hvd.Sum)
    fit(together, optimizer, my_rows(rank, size), ROWS // size)
    assert_close(weights(together), weights(alone), 1e-12)


def test_groups_of_variables(rank, size):
    """S4, S5: explicit lists, by identity."""
    alone, together = net(), net()
    fit(alone, O.SGD(0.05), ALL, ROWS)
    v = together.trainable_variables
    optimizer = hvd.DistributedOptimizer(O.SGD(0.05), name="lists", groups=[[v[0], v[3]], [v[5]]])
    fit(together, optimizer, my_rows(rank, size), ROWS // size)
    assert_close(weights(together), weights(alone), 1e-12)


def test_float32(rank, size):
    alone, together = net("float32"), net("float32")
    fit(alone, O.Adam(0.01), ALL, ROWS)
    fit(together, hvd.DistributedOptimizer(O.Adam(0.01)), my_rows(rank, size), ROWS // size)
    assert_close(weights(together), weights(alone), 2e-5)
    assert_same_on_all_ranks(weights(together))


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_wires(wire, rank, size):
    alone, together = net("float32"), net("float32")
    fit(alone, O.SGD(0.05), ALL, ROWS)
    compression = getattr(hvd.Compression, wire)
    optimizer = hvd.DistributedOptimizer(O.SGD(0.05), compression=compression)
    fit(together, optimizer, my_rows(rank, size), ROWS // size)
    # Gradients below 1, rate 0.05, five steps, two roundings with relative errors of 2^-11 or 2^-8.
    assert_close(weights(together), weights(alone), 1e-3 if wire == "fp16" else 5e-3)
    assert_same_on_all_ranks(weights(together))


@pytest.mark.ranks(2, 3, deadline=120)
@pytest.mark.parametrize("dense", [False, True])
def test_embeddings(dense, rank, size):
    """H6: dense gradients and IndexedSlices in one model."""

    def model():
        keras.utils.set_random_seed(5)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                layers.Embedding(10, 4, dtype="float64"),
                layers.Flatten(dtype="float64"),
                layers.Dense(1, dtype="float64"),
            ]
        )

    generator = np.random.default_rng(1)
    x, y = generator.integers(0, 10, (STEPS * ROWS, 3)), generator.normal(size=(STEPS * ROWS, 1))

    def train(m, optimizer, rows, batch):
        m.compile(optimizer=optimizer, loss="mse")
        m.fit(x[rows], y[rows], batch_size=batch, shuffle=False, verbose=0)
        return weights(m)

    alone = train(model(), O.SGD(0.1), ALL, ROWS)
    optimizer = hvd.DistributedOptimizer(O.SGD(0.1), sparse_as_dense=dense)
    together = train(model(), optimizer, my_rows(rank, size), ROWS // size)
    assert_close(together, alone, 1e-12)
