"""Variables and gradients that differ between ranks in name, order, size or presence."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from gradred.tensorflow import DistributedGradientTape
from harness.training import (
    KERAS_3,
    ROWS,
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    double_precision,
    keras,
    loop,
    my_rows,
    net,
    weights,
)

pytestmark = [pytest.mark.ranks(2, 3, deadline=120), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741
MODES = pytest.mark.parametrize("mode", ["function", "eager"])


@pytest.fixture(autouse=True, scope="module")
def double():
    with double_precision():
        yield


@MODES
def test_other_names_on_some_ranks(mode, rank, size):
    """H18: one rank has built other models first, so that its layers are named differently."""
    alone = net()
    loop(alone, O.Adam(0.01), np.arange(STEPS * ROWS), ROWS, mode)
    all_names = set()
    while len(all_names) <= 1:  # earlier tests may have counted differently
        for _ in range(rank):
            net()
        together = net()
        names = [str(getattr(v, "path", v.name)) for v in together.trainable_variables]
        all_names = {tuple(n) for n in gradred.allgather_object(names)}
    optimizer = hvd.DistributedOptimizer(O.Adam(0.01), groups=2)
    loop(together, optimizer, my_rows(rank, size), ROWS // size, mode)
    assert_close(weights(together), weights(alone), 1e-12)
    assert_same_on_all_ranks(weights(together))


@MODES
def test_ranks_that_have_done_other_things(mode, rank, size):
    """One rank has wrapped an optimizer that it never uses, another has traced in vain, and a
    third has built its optimizer; layers that reduce by themselves are in it."""
    x = np.random.default_rng(rank).normal(size=(4, 3))
    layers = keras.layers
    if rank == 0:
        hvd.DistributedOptimizer(O.Adam(0.01))
    for i in range(2):
        if rank == 1:
            net(), hvd.SyncBatchNormalization(dtype="float64")
        keras.utils.set_random_seed(5 + i)
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="float64"),
                layers.Dense(4, dtype="float64"),
                hvd.SyncBatchNormalization(dtype="float64"),
                layers.Dense(4, dtype="float64"),
                hvd.SyncBatchNormalization(dtype="float64"),
            ]
        )
        optimizer = hvd.DistributedOptimizer(O.Adam(0.01))
        if rank == size - 1:
            optimizer.build(model.trainable_variables)

        def update(x, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - x[:, :1]))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        run = update
        if mode == "function":
            inner = tf.function(update)

            def outer(x, fails, inner=inner):
                loss = inner(x)
                if fails:
                    raise RuntimeError
                return loss

            outer = tf.function(outer)
            run = lambda x, outer=outer: outer(x, False)  # noqa: E731
            if rank == 1:
                with pytest.raises(RuntimeError):
                    outer.get_concrete_function(tf.TensorSpec(x.shape, tf.float64), True)
        losses = [float(run(tf.constant(x))) for _ in range(5)]
        assert losses[-1] < losses[0]
        assert_same_on_all_ranks(weights(model))


@MODES
def test_models_that_train_in_threads_of_their_own(mode, rank, size):
    """Two optimizers with names; the ranks come to them in different orders."""
    expected = []
    for i in range(2):
        alone = net(seed=20 + i)
        loop(alone, O.Adam(0.01 * (i + 1)), np.arange(STEPS * ROWS), ROWS, mode)
        expected.append(weights(alone))
    models = [net(seed=20 + i) for i in range(2)]
    optimizers = [hvd.DistributedOptimizer(O.Adam(0.01 * (i + 1)), name=f"of {i}") for i in (0, 1)]

    def train(i):
        loop(models[i], optimizers[i], my_rows(rank, size), ROWS // size, mode)

    order = (0, 1) if rank == 0 else (1, 0)
    threads = [threading.Thread(target=train, args=(i,)) for i in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, values in zip(models, expected, strict=True):
        assert_close(weights(model), values, 1e-12)


@pytest.mark.ranks(2, deadline=120)
@MODES
def test_other_groups_on_some_ranks(mode, rank, size):
    """S13: the plan; the error is alike on all ranks, and nobody trains."""
    v = [tf.Variable([1.0]) for _ in range(6)]
    optimizer = hvd.DistributedOptimizer(O.SGD(0.1), groups=2 + rank)
    optimizer.build(v)

    def step():
        optimizer.apply_gradients([(tf.ones([1]), w) for w in v])

    run = tf.function(step) if mode == "function" else step
    with pytest.raises((gradred.Mismatch, tf.errors.FailedPreconditionError)) as caught:
        run()
    text = str(caught.value)
    assert "rank 0" in text and "rank 1" in text and "group" in text
    assert all(float(w[0]) == 1.0 for w in v)


@MODES
def test_images_of_other_sizes(mode, rank, size):
    """H14: a fully convolutional network, sizes that differ between ranks and steps."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((None, None, 1), dtype="float64"),
            layers.Conv2D(3, 3, padding="same", activation="tanh", dtype="float64"),
            layers.Conv2D(1, 3, padding="same", dtype="float64"),
        ]
    )
    v = model.trainable_variables
    optimizer = hvd.DistributedOptimizer(O.SGD(0.1))
    optimizer.build(v)

    def images(step, r):
        shape = (1, 4 + (step + 2 * r) % 5, 3 + (2 * step + r) % 4, 1)
        return tf.constant(np.random.default_rng([step, r]).normal(size=shape))

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - x))
        return tape.gradient(loss, v)

    def step(x):
        optimizer.apply_gradients(zip(gradients(x), v, strict=True))

    run = step
    if mode == "function":
        run = tf.function(step, input_signature=[tf.TensorSpec([1, None, None, 1], tf.float64)])
    for i in range(6):
        of_ranks = [gradients(images(i, r)) for r in range(size)]
        expected = [
            w.numpy() - 0.1 * sum(np.asarray(g[k]) for g in of_ranks) / size
            for k, w in enumerate(v)
        ]
        run(images(i, rank))
        assert_close([w.numpy() for w in v], expected, 1e-12)


@MODES
def test_half_and_single_gradients_in_one_group(mode, rank, size):
    """H5"""
    dtypes = [tf.float16, tf.float32, tf.float64, tf.bfloat16, tf.float32]
    v = [tf.Variable(tf.ones([n + 1], d)) for n, d in enumerate(dtypes)]

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.cast(w * w, tf.float64)) for w in v]) * (rank + 1.0)
        tape = DistributedGradientTape(tape, groups=1, op=hvd.Sum)
        return tape.gradient(loss, v)

    run = tf.function(step) if mode == "function" else step
    for _ in range(2):
        for w, gradient in zip(v, run(), strict=True):
            assert gradient.dtype == w.dtype
            expected = np.full(w.shape, size * (size + 1))
            np.testing.assert_array_equal(tf.cast(gradient, tf.float64), expected)


@MODES
def test_a_group_without_gradients(mode, rank, size):
    """H4: a group whose gradients are all None, and more groups than variables."""
    a, b, c = (tf.Variable([float(i)]) for i in range(3))
    for groups in ([[b, c], [a]], 7):
        optimizer = hvd.DistributedOptimizer(O.SGD(1.0), groups=groups)
        optimizer.build([a, b, c])
        start = [float(w[0]) for w in (a, b, c)]

        def step(optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(a) * (rank + 1.0)
            gradients = tape.gradient(loss, [a, b, c])
            optimizer.apply_gradients(zip(gradients, [a, b, c], strict=True))

        run = tf.function(step) if mode == "function" else step
        for _ in range(2):
            run()
        assert [float(w[0]) for w in (a, b, c)] == [start[0] - (size + 1), *start[1:]]


@MODES
def test_variables_that_no_rank_uses_are_left_alone(mode, rank, size):
    """H21: also by weight decay and momentum, and where others are missing on some ranks."""
    variables = [tf.Variable([2.0]) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(O.AdamW(0.1, weight_decay=0.5))
    optimizer.build(variables)

    def step(users):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0])
            for v, used in zip(variables[1:], users, strict=True):
                loss += tf.reduce_sum(v) if used else 0.0
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(step) if mode == "function" else step
    before = [float(v[0]) for v in variables]
    for users in ((rank == 0, False, True), (False, False, rank == 1), (False, True, False)):
        run(users)
        after = [float(v[0]) for v in variables]
        everyone = [any(u) for u in zip(*gradred.allgather_object(users), strict=True)]
        moved = [a != b for a, b in zip(after, before, strict=True)]
        assert moved == [True, *everyone]
        before = after
    assert_same_on_all_ranks([np.array(before)])


@pytest.mark.skipif(not KERAS_3, reason="an option of Keras 3")
@MODES
def test_accumulation_with_a_gradient_that_is_none(mode, rank, size):
    """H7"""
    a, b = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(O.SGD(0.5, gradient_accumulation_steps=2))
    optimizer.build([a, b])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(a) * (rank + 1.0)
        gradients = tape.gradient(loss, [a, b])
        optimizer.apply_gradients(zip(gradients, [a, b], strict=True))

    run = tf.function(step) if mode == "function" else step
    for i in range(1, 5):
        run()
        assert float(a[0]) == 1.0 - 0.5 * (size + 1) / 2 * (i // 2)
        assert float(b[0]) == 1.0


@MODES
def test_graphs_after_another_init(mode, rank, size):
    """H2: what was built and traced before works after."""
    model = net("float32")
    optimizer = hvd.DistributedOptimizer(O.SGD(0.05))
    x = tf.constant(np.random.default_rng(rank).normal(size=(4, 5)), tf.float32)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if mode == "function" else step
    for _ in range(3):
        run()
        assert_same_on_all_ranks(weights(model))
        gradred.shutdown()
        with pytest.raises((gradred.NotInitialized, tf.errors.FailedPreconditionError)):
            run()
        gradred.init()
