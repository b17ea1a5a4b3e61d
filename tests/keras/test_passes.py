"""backward_passes_per_step: several passes, one reduction, one update."""

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
    data,
    double_precision,
    keras,
    mse,
    my_rows,
    net,
    scale_of,
    scaled,
    unscaled,
    weights,
)

pytestmark = [pytest.mark.ranks(2, deadline=120), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741
MODES = pytest.mark.parametrize("mode", ["function", "eager"])
PASSES = 2


@pytest.fixture(autouse=True, scope="module")
def double():
    with double_precision():
        yield


OPTIMIZERS = {
    "Adam, schedule": lambda: O.Adam(O.schedules.ExponentialDecay(0.01, 1, 0.5)),
}
if KERAS_3:
    OPTIMIZERS["EMA, clipped"] = lambda: O.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
    )
else:
    OPTIMIZERS["legacy"] = lambda: O.legacy.Adam(0.01)


def count(optimizer):
    return int(tf.convert_to_tensor(optimizer.iterations))


def train(model, optimizer, rows, batch, options=None):
    x, y = data()
    model.compile(optimizer=optimizer, loss=mse, **(options or {}))
    model.fit(x[rows], y[rows], batch_size=batch, shuffle=False, verbose=0)


@pytest.mark.ranks(1, 2, 3, 4, deadline=120)
@pytest.mark.parametrize("eager", [False, True])
def test_fit_as_with_larger_batches(eager, rank, size):
    _fit_as_with_larger_batches("Adam, schedule", eager, rank, size)


@pytest.mark.ranks(2, deadline=120)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adam, schedule"])
def test_fit_with_other_optimizers(name, rank, size):
    _fit_as_with_larger_batches(name, False, rank, size)


def _fit_as_with_larger_batches(name, eager, rank, size):
    """Two passes over halves of a batch, against one process that sees whole batches."""
    alone, together = net(), net()
    updates = STEPS * ROWS // (2 * ROWS)
    rows = np.arange(updates * 2 * ROWS)
    train(alone, OPTIMIZERS[name](), rows, 2 * ROWS)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](), backward_passes_per_step=PASSES, average_aggregated_gradients=True
    )
    before = gradred.metrics().batches
    mine = my_rows(rank, size)[: PASSES * updates * ROWS // size]
    train(together, optimizer, mine, ROWS // size, {"run_eagerly": eager})
    # One reduction an update, and one of the number of passes.
    assert gradred.metrics().batches - before == 2 * updates
    assert count(optimizer) == updates
    assert_close(weights(together), weights(alone), 1e-12)
    assert_same_on_all_ranks(weights(together))


def families():
    yield "keras", lambda: O.SGD(0.5)
    if not KERAS_3:
        yield "legacy", lambda: O.legacy.SGD(0.5)
    yield "v1", lambda: tf.compat.v1.train.GradientDescentOptimizer(0.5)


FAMILIES = pytest.mark.parametrize(
    "make", [m for _, m in families()], ids=[n for n, _ in families()]
)


@pytest.mark.ranks(2, 3, deadline=120)
@FAMILIES
@MODES
@pytest.mark.parametrize("average", [False, True])
def test_exact_sums(make, average, mode, rank, size):
    """Dense, sparse and missing gradients; the sums begin anew after an update."""
    a, table, never = tf.Variable([1.0]), tf.Variable(tf.ones([4, 1])), tf.Variable([5.0])
    variables = [a, table, never]
    optimizer = hvd.DistributedOptimizer(
        make(), op=hvd.Sum, backward_passes_per_step=4, average_aggregated_gradients=average
    )
    if hasattr(optimizer, "build"):
        optimizer.build(variables)

    def step(x, use):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a) * x + 2.0 * tf.reduce_sum(tf.gather(table, [1, 1, rank]))
            loss += tf.cond(use, lambda: tf.reduce_sum(a), lambda: tf.constant(0.0))
        gradients = tape.gradient(loss, variables)
        assert gradients[2] is None and isinstance(gradients[1], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(step, autograph=False) if mode == "function" else step
    before = gradred.metrics().batches
    of_a, of_table = 1.0, np.ones(4)
    scale = 0.5 / (4 if average else 1)
    for i in range(1, 10):
        run(tf.constant(float(rank + i)), tf.constant(i % 2 == 0))
        if i % 4 == 0:
            for j in range(i - 3, i + 1):
                of_a -= scale * sum(r + j + (j % 2 == 0) for r in range(size))
                for r in range(size):
                    np.subtract.at(of_table, [1, 1, r], scale * 2.0)
        np.testing.assert_array_equal(a, [of_a])
        np.testing.assert_array_equal(table[:, 0], of_table)
        assert float(never[0]) == 5.0
        assert gradred.metrics().batches - before == 2 * (i // 4)


@MODES
def test_a_gradient_that_comes_in_some_passes_on_some_ranks(mode, rank, size):
    """H7, H21"""
    a, b = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), op=hvd.Sum, backward_passes_per_step=2)
    optimizer.build([a, b])

    def step(use_b):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a)
            if use_b:
                loss += tf.reduce_sum(b)
        gradients = tape.gradient(loss, [a, b])
        optimizer.apply_gradients(zip(gradients, [a, b], strict=True))

    run = tf.function(step) if mode == "function" else step
    for i in range(6):
        run(i == 2 and rank == 0)  # retraced where it differs
    np.testing.assert_array_equal(a, [1.0 - 6 * size])
    np.testing.assert_array_equal(b, [0.0])


@FAMILIES
def test_the_count_and_the_sums_are_saved(make, rank, size, tmp_path):
    """Each rank's own, in the middle of an update."""

    def trainer():
        v = tf.Variable([1.0, 2.0])
        optimizer = hvd.DistributedOptimizer(
            make(), op=hvd.Sum, backward_passes_per_step=3, name="saved"
        )
        if hasattr(optimizer, "build"):
            optimizer.build([v])

        def step(x):
            optimizer.apply_gradients([(tf.constant([x, 1.0]) * (rank + 1.0), v)])

        return v, step, tf.train.Checkpoint(v=v, optimizer=optimizer)

    v, step, checkpoint = trainer()
    for x in (1.0, 2.0, 3.0, 4.0, 5.0):
        step(x)
    path = checkpoint.write(str(tmp_path / "middle"))
    again, step_again, restored = trainer()
    restored.read(path)
    np.testing.assert_array_equal(again, v)
    for x in (6.0, 7.0, 8.0, 9.0):
        step(x)
        step_again(x)
        np.testing.assert_array_equal(again, v)
    total = size * (size + 1) / 2
    np.testing.assert_array_equal(v, [1.0 - 0.5 * 45 * total, 2.0 - 0.5 * 9 * total])


@FAMILIES
@MODES
def test_a_checkpoint_that_one_rank_alone_restores(make, mode, rank, size, tmp_path):
    """From between two updates: the sums are not those of the same passes."""

    def trainer():
        v = tf.Variable([1.0])
        optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=2, name="restored")
        if hasattr(optimizer, "build"):
            optimizer.build([v])

        def step():
            optimizer.apply_gradients([(tf.ones([1]), v)])

        run = tf.function(step, autograph=False) if mode == "function" else step
        return v, run, tf.train.Checkpoint(v=v, optimizer=optimizer)

    v, run, checkpoint = trainer()
    run()
    path = checkpoint.write(str(tmp_path / "middle"))
    v, run, checkpoint = trainer()
    if rank == 0:
        checkpoint.read(path)
    gradred.tensorflow.broadcast_variables([v], 0)
    if rank != 0:
        run()
    with pytest.raises((gradred.Mismatch, tf.errors.OpError), match=r"(?s)passes since.*rank 0"):
        run()
    assert float(v[0]) == 1.0


def test_files_of_keras_know_nothing_of_it(rank, size, tmp_path):
    """S15: a file from between two updates loads without gradred and goes on after wrapping."""
    x, y = data()
    rows = my_rows(rank, size)[: 4 * ROWS // size]
    model = net("float32")
    wrap = {"backward_passes_per_step": PASSES}
    model.compile(optimizer=hvd.DistributedOptimizer(O.Adam(0.01), **wrap), loss="mse")
    model.fit(x[rows], y[rows], batch_size=ROWS // size, shuffle=False, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is O.Adam
    assert count(loaded.optimizer) == 2
    hvd.DistributedOptimizer(loaded.optimizer, **wrap)
    for m in (model, loaded):
        m.fit(x[rows], y[rows], batch_size=ROWS // size, shuffle=False, verbose=0)
    assert count(loaded.optimizer) == 4
    assert_close(weights(loaded), weights(model), 0)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("order", ["scale outside", "scale inside"])
def test_loss_scale(order, eager, rank, size):
    """H8: infinite in one pass on one rank, and all ranks skip the update."""
    scale = keras.mixed_precision.LossScaleOptimizer
    wrap = {"backward_passes_per_step": PASSES, "op": hvd.Sum}
    if order == "scale outside":
        optimizer = scale(hvd.DistributedOptimizer(O.SGD(0.5), **wrap), initial_scale=8.0)
    else:
        optimizer = hvd.DistributedOptimizer(scale(O.SGD(0.5), initial_scale=8.0), **wrap)
    v = tf.Variable([1.0, 2.0])
    optimizer.build([v])

    def step(x):
        with tf.GradientTape() as tape:
            loss = scaled(optimizer, tf.reduce_sum(v * x))
        gradients = unscaled(optimizer, tape.gradient(loss, [v]))
        optimizer.apply_gradients(zip(gradients, [v], strict=True))

    run = step if eager else tf.function(step)
    expected = np.float32([1, 2])
    for update in range(size + 2):
        for i in range(PASSES):
            bad = update == rank and i == update % PASSES
            run(tf.constant([np.inf if bad else 1.0, 2.0]))
        if update >= size:
            expected = expected - np.float32(0.5) * np.float32([2, 4]) * size
        np.testing.assert_array_equal(v, expected)
        assert scale_of(optimizer) == 8.0 / 2 ** min(update + 1, size)


def test_an_optimizer_that_has_stepped(rank, size):
    """S11"""
    v = tf.Variable([1.0])
    optimizer = O.SGD(0.5, momentum=0.5)
    optimizer.build([v])
    optimizer.apply_gradients([(tf.constant([1.0]), v)])
    hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, op=hvd.Sum)
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant([1.0]), v)])
    assert count(optimizer) == 2
    momentum = -0.5
    np.testing.assert_array_equal(v, [1.0 + momentum + (0.5 * momentum - 0.5 * 2 * size)])


@MODES
def test_a_reduction_that_fails_leaves_the_sums(mode, rank, size):
    """H19, as far as the gradients at hand are concerned: those of the failed pass are lost."""
    v = tf.Variable([1.0])
    good = tf.Variable(True, trainable=False)
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), op=hvd.Sum, backward_passes_per_step=2)
    optimizer.build([v])

    def step():
        check = tf.debugging.Assert(good, ["not good"])
        with tf.control_dependencies([check] if check is not None else []):
            gradient = tf.ones([1])
        optimizer.apply_gradients([(gradient, v)])

    if mode == "eager":
        pytest.skip("a rank that fails before it calls has nothing to tell the others")
    run = tf.function(step)
    run()
    good.assign(rank != 0)
    with pytest.raises(tf.errors.OpError):
        run()
    good.assign(True)
    assert float(v[0]) == 1.0
    run()
    assert float(v[0]) == 1.0 - 2 * size
