"""groups= in all forms, and all operations, with exact values."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from gradred.tensorflow import DistributedGradientTape
from gradred.tensorflow import DistributedOptimizer as TensorFlowOptimizer
from harness.training import KERAS_3, keras

pytestmark = pytest.mark.ranks(2, deadline=120)

O = keras.optimizers  # noqa: E741
MODES = pytest.mark.parametrize("mode", ["function", "eager"])


def variables():
    return [tf.Variable(np.full(i + 1, 1.0), name="same") for i in range(5)]


GROUPS = {
    "none": lambda v: None,
    "zero": lambda v: 0,
    "a number": lambda v: 2,
    "a number of NumPy": lambda v: np.int64(3),
    "more than variables": lambda v: 100,
    "no lists": lambda v: [],
    "an empty list": lambda v: [[], [v[0], v[4]]],
    "lists": lambda v: [[v[1], v[3]], [v[0]]],
    "tuples": lambda v: ((v[1], v[3]), (v[0], v[2], v[4])),
    "unused variables": lambda v: [[v[2], tf.Variable(1.0)], [tf.Variable(2.0)]],
    "a size": lambda v: "16B",
    "layers": lambda v: "layer",
    "bytes": lambda v: "bytes",
}


@pytest.mark.ranks(1, 2, 4, deadline=120)
@MODES
@pytest.mark.parametrize("form", list(GROUPS))
def test_forms(form, mode, rank, size):
    """H4, S4, S5: also with a None among the gradients; by the tape and by the optimizer."""
    v = variables()
    groups = GROUPS[form](v)
    optimizer = TensorFlowOptimizer(O.SGD(1.0), op=hvd.Sum, groups=groups)
    optimizer.build(v)

    def gradients(tape_options=None):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w) * (i + 1.0) for i, w in enumerate(v) if i != 2])
            loss *= rank + 1.0
        if tape_options is not None:
            tape = DistributedGradientTape(tape, **tape_options)
        return tape.gradient(loss, v)

    def by_tape():
        return gradients({"op": hvd.Sum, "groups": groups})

    def by_optimizer():
        optimizer.apply_gradients(zip(gradients(), v, strict=True))

    if mode == "function":
        by_tape, by_optimizer = tf.function(by_tape), tf.function(by_optimizer)
    by_optimizer()  # first: a tape's use is remembered in eager mode
    total = size * (size + 1) / 2
    for i, w in enumerate(v):
        slope = 0.0 if i == 2 else (i + 1.0) * total
        np.testing.assert_array_equal(w, np.full(i + 1, 1.0 - slope))
    for i, gradient in enumerate(by_tape()):
        if i == 2 and mode == "eager":
            assert gradient is None
        else:
            slope = 0.0 if i == 2 else (i + 1.0) * total
            np.testing.assert_array_equal(gradient, np.full(i + 1, slope))


def test_lists_are_what_travels_together(rank, size):
    v = variables()
    optimizer = hvd.DistributedOptimizer(
        O.SGD(1.0), name="in lists", groups=[[v[0], v[4]], [], [v[2], v[1]]]
    )
    optimizer.build(v)
    optimizer.apply_gradients([(tf.ones_like(w), w) for w in v])
    text = gradred.plan("optimizer:in lists.eager")
    assert text.count("group ") == 3, text  # v[3] alone
    assert "group 2" in text and "group 3" not in text


@pytest.mark.parametrize(("groups", "count"), [(1, 1), (2, 2), (100, 5), ("16B", 4), ("layer", 5)])
def test_numbers_and_sizes_cut_as_they_say(groups, count, rank, size):
    """S4: 4, 8, 12, 16 and 20 bytes, the last first."""
    v = [tf.Variable(np.ones(i + 1, np.float32), name=f"v{i}") for i in range(5)]
    name = f"cut {groups}"
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), name=name, groups=groups)
    optimizer.build(v)
    optimizer.apply_gradients([(tf.ones_like(w), w) for w in v])
    text = gradred.plan(f"optimizer:{name}.eager")
    assert text.count("group ") == count, text


@MODES
@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_operations(op, mode, rank, size):
    """In fit as in a loop, of the whole of a model of Keras."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
    )
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), op=getattr(hvd, op))
    model.compile(optimizer, lambda y, p: tf.reduce_sum(p), run_eagerly=mode == "eager")
    rows = [[r + 1.0, 4.0 - r] for r in range(size)]
    model.fit(np.array([rows[rank]]), np.ones((1, 1)), verbose=0)
    reduction = {"Sum": np.sum, "Average": np.mean, "Min": np.min, "Max": np.max}.get(op, np.prod)
    expected = 1.0 - reduction(np.array(rows), 0)[:, np.newaxis]
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-6)


@MODES
@pytest.mark.parametrize("factor", [0.5, 2.0, 8.0])
def test_predivide(factor, mode, rank, size):
    """Powers of two: the average to the last bit."""
    v = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), gradient_predivide_factor=factor)
    optimizer.build([v])

    def step():
        optimizer.apply_gradients([(tf.constant([rank + 1.0, 7.0]), v)])

    (tf.function(step) if mode == "function" else step)()
    mean = np.float32(size * (size + 1) / 2) / np.float32(size)
    np.testing.assert_allclose(v, [-mean, -7.0], rtol=1e-6)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 has the tf.Variables themselves")
def test_variables_of_keras_and_those_in_them_are_the_same(rank, size):
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    kernel, bias = layer.trainable_variables
    optimizer = hvd.DistributedOptimizer(
        O.SGD(1.0), name="inside", groups=[[kernel.value, bias.value]]
    )
    optimizer.build([kernel, bias])
    optimizer.apply_gradients([(tf.ones_like(w), w) for w in (kernel, bias)])
    assert gradred.plan("optimizer:inside.eager").count("group ") == 1
