"""Each gradient is reduced once: what would be never or twice is refused, on Keras 2 and 3."""

from __future__ import annotations

import numpy as np
import pytest

import gradred.keras as hvd
import tensorflow as tf
from gradred.errors import InvalidArgument, Unsupported
from gradred.tensorflow import DistributedGradientTape, allreduce
from harness.training import KERAS_3, keras, mse, net

pytestmark = [pytest.mark.ranks(2, deadline=120), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741
MODES = pytest.mark.parametrize("mode", ["function", "eager"])
KERAS_2_ONLY = pytest.mark.skipif(KERAS_3, reason="arguments of Keras 2")


def made(mode, function):
    return tf.function(function, autograph=False) if mode == "function" else function


class Stubborn(O.SGD):
    """Updates variables itself, past what reduces."""

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        for gradient, variable in grads_and_vars:
            if KERAS_3:
                self.update_step(gradient, variable, self.learning_rate)
            else:
                self.update_step(gradient, variable)


@MODES
def test_an_optimizer_that_goes_past_the_reduction(mode, rank):
    v = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(Stubborn(0.1))
    optimizer.build([v])
    if not KERAS_3:  # there apply_gradients is what reduces
        step = made(mode, lambda: optimizer.update_step(tf.ones([1]), v))
    else:
        step = made(mode, lambda: optimizer.apply_gradients([(tf.ones([1]), v)]))
    with pytest.raises(InvalidArgument, match="that nobody has reduced"):
        step()
    assert float(v[0]) == 1.0


@MODES
@pytest.mark.parametrize("clipped", [False, True])
def test_rows_that_a_tape_has_reduced(clipped, mode, rank, size):
    """S2: of a model with nothing but embeddings."""
    table = tf.Variable(tf.ones([64, 2]))
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), op=hvd.Sum)
    optimizer.build([table])

    def step(aggregated):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [3, rank]))
        gradients = DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [table])
        assert isinstance(gradients[0], tf.IndexedSlices)
        if clipped:
            gradients, _ = tf.clip_by_global_norm(gradients, 1e3)
        pairs = zip(gradients, [table], strict=True)
        optimizer.apply_gradients(pairs, **(_arguments("new") if aggregated else {}))

    with pytest.raises(InvalidArgument, match="use one of the two"):
        made(mode, lambda: step(False))()
    np.testing.assert_array_equal(table[3], [1.0, 1.0])
    if not KERAS_3:  # the converse: a caller who says so is right
        made(mode, lambda: step(True))()
        np.testing.assert_allclose(table[3], [1.0 - size] * 2)


def _arguments(kind):
    name = "skip_gradients_aggregation" if kind == "new" else "experimental_aggregate_gradients"
    return {name: kind == "new"}


@KERAS_2_ONLY
@MODES
@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_a_caller_who_says_that_gradients_are_aggregated(kind, mode, rank, size):
    """Taken at its word if a tape has reduced them, or if they are local; else refused."""
    make = O.SGD if kind == "new" else O.legacy.SGD
    v, own = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(make(1.0))
    plain = hvd.DistributedOptimizer(make(1.0))

    def step(distributed):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v) * (rank + 1.0)
        if distributed:
            tape = DistributedGradientTape(tape, op=hvd.Sum)
        gradients = tape.gradient(loss, [v])
        chosen = optimizer if distributed else plain
        chosen.apply_gradients(zip(gradients, [v], strict=True), **_arguments(kind))

    with pytest.raises(InvalidArgument, match="nobody has reduced the gradient"):
        made(mode, lambda: step(False))()
    assert float(v[0]) == 1.0
    made(mode, lambda: step(True))()
    assert float(v[0]) == 1.0 - size * (size + 1) / 2
    local = hvd.DistributedOptimizer(make(1.0))
    local.register_local_var(own)

    def apply():
        local.apply_gradients([(tf.ones([1]), own)], **_arguments(kind))

    made(mode, apply)()
    assert float(own[0]) == 0.0


@KERAS_2_ONLY
def test_gradients_of_ones_own_allreduce(rank, size):
    v = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0))

    @tf.function(autograph=False)
    def step():
        gradient = allreduce(tf.ones([1]) * (rank + 1.0), op=hvd.Sum) * 0.5
        optimizer.apply_gradients([(gradient, v)], skip_gradients_aggregation=True)

    step()
    assert float(v[0]) == 1.0 - 0.5 * size * (size + 1) / 2


@KERAS_2_ONLY
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["new", "legacy"])
@MODES
def test_minimize_reduces(kind, passes, mode, rank, size):
    v = tf.Variable([1.0])
    optimizer = (O.SGD if kind == "new" else O.legacy.SGD)(0.5)
    hvd.DistributedOptimizer(optimizer, op=hvd.Sum, backward_passes_per_step=passes)

    def step():
        optimizer.minimize(lambda: tf.reduce_sum(v) * (rank + 1.0), [v])

    run = made(mode, step)
    for _ in range(2):
        run()
    assert float(v[0]) == 1.0 - size * (size + 1) / 2
    assert int(optimizer.iterations) == 2 // passes


def test_wrapping_twice_is_refused():
    """H9, in all orders; also of copies, legacy optimizers, and of one inside a group."""
    scale = keras.mixed_precision.LossScaleOptimizer
    made = [scale(hvd.DistributedOptimizer(O.SGD(0.1)))]
    made.append(hvd.DistributedOptimizer(scale(O.SGD(0.1))))
    made.append(hvd.DistributedOptimizer(O.SGD(0.1)))
    made.append(type(made[-1]).from_config(made[-1].get_config()))
    if not KERAS_3:
        made.append(hvd.DistributedOptimizer(O.legacy.SGD(0.1)))
    for optimizer in made:
        with pytest.raises(InvalidArgument, match="is distributed already"):
            hvd.DistributedOptimizer(optimizer)


@MODES
def test_jit_is_refused_when_traced(mode, rank, size):
    v = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0))
    optimizer.build([v])

    def step():
        optimizer.apply_gradients([(tf.ones([1]) * (rank + 1.0), v)])

    with pytest.raises(Unsupported, match="jit_compile=False"):
        tf.function(step, jit_compile=True)()
    made(mode, step)()
    assert float(v[0]) == 1.0 - (size + 1) / 2


@pytest.mark.skipif(KERAS_3, reason="Keras 3 switches it off itself: test_wrapping.py")
def test_jit_in_fit_of_keras_2(rank, size):
    model = net("float32")
    model.compile(hvd.DistributedOptimizer(O.SGD(0.1)), mse, jit_compile=True)
    with pytest.raises(Exception, match="jit_compile=False"):
        model.fit(np.ones((2, 5)), np.ones((2, 2)), verbose=0)
