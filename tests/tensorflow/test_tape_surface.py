"""All that a tf.GradientTape can do, on one that is distributed."""

from __future__ import annotations

import numpy as np
import pytest

import gradred.tensorflow as hvd
import tensorflow as tf
from gradred.errors import InvalidArgument, Unsupported

pytestmark = pytest.mark.ranks(2)

BOTH = pytest.mark.parametrize("mode", ["eager", "graph"])


def traced(function, mode):
    return tf.function(function, autograph=False) if mode == "graph" else function


def total(size):
    return size * (size + 1) / 2


@pytest.mark.ranks(1, 2, 3)
@BOTH
def test_structures_of_sources(mode, rank, size):
    a, b, c = tf.Variable(1.0), tf.Variable([1.0, 1.0]), tf.Variable([[1.0]])
    factor = rank + 1.0
    structures = [
        a,
        [a],
        (a, b),
        {"x": a, "y": [b, {"z": c}]},
        [[a, b], [c]],
        [],
        [a, a],
    ]

    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True), op=hvd.Sum) as tape:
            loss = (a + 2.0 * tf.reduce_sum(b) + 3.0 * tf.reduce_sum(c)) * factor
        return [tape.gradient(loss, sources) for sources in structures]

    slopes = {id(a): 1.0, id(b): 2.0, id(c): 3.0}
    for sources, gradients in zip(structures, traced(step, mode)(), strict=True):
        tf.nest.assert_same_structure(sources, gradients)
        pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True)
        for source, gradient in pairs:
            expected = np.full(source.shape, slopes[id(source)] * total(size))
            np.testing.assert_array_equal(gradient, expected)


@BOTH
def test_tensors_as_sources(mode, rank, size):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x * (rank + 1.0)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(y, x)

    x = tf.constant([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(traced(step, mode)(x), [2 * i * total(size) for i in (1, 2, 3)])


@BOTH
def test_output_gradients_and_lists_of_targets(mode, rank, size):
    v = tf.Variable([1.0, 2.0])

    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            targets = [v * 2.0, tf.reduce_sum(v) * 3.0]
        weights = [tf.constant([1.0, 10.0]) * (rank + 1.0), tf.constant(rank + 1.0)]
        return tape.gradient(targets, v, output_gradients=weights)

    np.testing.assert_array_equal(traced(step, mode)(), np.array([5.0, 23.0]) * total(size))


@BOTH
def test_unconnected_gradients(mode, rank, size):
    v, w = tf.Variable([1.0]), tf.Variable([1.0, 1.0])

    def step(unconnected):
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = tf.reduce_sum(v) + (tf.reduce_sum(w) if rank == 0 and size > 1 else 0.0)
        return tape.gradient(loss, [v, w], unconnected_gradients=unconnected)

    for unconnected in (tf.UnconnectedGradients.ZERO, "zero"):
        of_v, of_w = traced(lambda u=unconnected: step(u), mode)()
        np.testing.assert_array_equal(of_v, [size])
        np.testing.assert_array_equal(of_w, [1.0 if size > 1 else 0.0] * 2)


@BOTH
def test_generic_names_let_ranks_call_in_different_places(mode, rank, size):
    v = tf.Variable(1.0)

    def one():
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = v * (rank + 1.0)
        return tape.gradient(loss, [v], use_generic_names=True)

    def another():
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = v * (rank + 1.0)
        return tape.gradient(loss, [v], None, True)  # Horovod's order

    assert float(traced(one if rank == 0 else another, mode)()[0]) == total(size)


@BOTH
def test_jacobians_are_local(mode, rank, size):
    v = tf.Variable([1.0, 2.0])
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1.0)

    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True), op=hvd.Sum) as tape:
            tape.watch(x)
            y = v * v * (rank + 1.0)
            z = x * x
        return (
            tape.jacobian(y, v),
            tape.jacobian(y, v, experimental_use_pfor=False),
            tape.batch_jacobian(z, x),
            tape.gradient(y, v),
        )

    first, second, batch, gradient = traced(step, mode)()
    expected = np.diag([2.0, 4.0]) * (rank + 1)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, expected)
    np.testing.assert_array_equal(batch, [np.diag(2.0 * row) for row in x.numpy()])
    np.testing.assert_array_equal(gradient, np.array([2.0, 4.0]) * total(size))


def test_recording(rank, size):
    v, w = tf.Variable(2.0), tf.Variable(3.0)
    with hvd.DistributedGradientTape(
        tf.GradientTape(persistent=True, watch_accessed_variables=False), op=hvd.Sum
    ) as tape:
        tape.watch(v)
        y = v * w
        with tape.stop_recording():
            hidden = v * 5.0
        z = y + hidden
    assert [u is v for u in tape.watched_variables()] == [True]
    of_v, of_w = tape.gradient(z, [v, w])
    assert float(of_v) == 3.0 * size and of_w is None
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
        lost = v * 1.0
        tape.reset()
        y = v * 2.0 + tf.stop_gradient(lost)
    assert float(tape.gradient(y, v)) == 2.0 * size
    with pytest.raises(RuntimeError, match="persistent"):
        tape.gradient(y, v)


@BOTH
def test_a_tape_in_a_tape(mode, rank, size):
    """A gradient penalty: the inner tape is plain, the outer one reduces."""
    v = tf.Variable(3.0)

    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as outer:
            with tf.GradientTape() as inner:
                y = v**3 * (rank + 1.0)
            slope = inner.gradient(y, v)
        return outer.gradient(slope, v)

    assert float(traced(step, mode)()) == 18.0 * total(size)


@BOTH
def test_what_a_tape_reduced_is_not_differentiable(mode, rank, size):
    v = tf.Variable(3.0)

    def step():
        with tf.GradientTape() as outer:
            with hvd.DistributedGradientTape(tf.GradientTape()) as inner:
                y = v**3
            slope = inner.gradient(y, v)
        return outer.gradient(slope, v)

    with pytest.raises((Unsupported, LookupError), match=r"differentiable|no gradient"):
        traced(step, mode)()


def test_sources_that_cannot_be_reduced(rank, size):
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        tape.watch(ragged)
        y = ragged * 2.0
    with pytest.raises(Unsupported, match="RaggedTensor"):
        tape.gradient(y, ragged)
    v = tf.Variable(tf.complex(1.0, 2.0))
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        y = v * 2.0
    with pytest.raises(InvalidArgument, match="dtype complex64"):
        tape.gradient(y, v)


def test_a_class_of_tapes(rank, size):
    class Tape(tf.GradientTape):
        def gradient(self, *args, **kwargs):
            return tf.nest.map_structure(lambda g: g * 2.0, super().gradient(*args, **kwargs))

    v = tf.Variable(1.0)
    tape = hvd.DistributedGradientTape(Tape(), op=hvd.Sum)
    assert isinstance(tape, Tape)
    with tape:
        y = v * 3.0
    assert float(tape.gradient(y, v)) == 6.0 * size


@pytest.mark.parametrize("autograph", [True, False])
@pytest.mark.parametrize("where", ["function", "outside"])
def test_jit_is_refused_when_traced(where, autograph, rank, size):
    v = tf.Variable(1.0)

    def step():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = v * 2.0
        return tape.gradient(loss, v)

    run = tf.function(step, autograph=autograph)
    outer = step if where == "function" else lambda: run() + 1.0
    compiled = tf.function(outer, jit_compile=True, autograph=autograph)
    with pytest.raises(Unsupported, match="jit_compile=False"):
        compiled()
    assert float(run()) == 2.0  # the same function outside of it
    if where == "outside":  # nothing is traced again; TensorFlow names the operation
        with pytest.raises(tf.errors.InvalidArgumentError, match="Gradred"):
            tf.function(outer, jit_compile=True, autograph=autograph)()
