"""Layers and variables whose gradients stay on their rank, and process sets."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import gradred.tensorflow as hvd_tf
import tensorflow as tf
from gradred.errors import InvalidArgument
from harness.training import KERAS_3, assert_same_on_all_ranks, keras

pytestmark = [pytest.mark.ranks(2, deadline=60), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741
BOTH = pytest.mark.parametrize("mode", ["function", "eager"])


def model():
    """y = c * (b * (a * x)), a in a model of its own."""
    keras.utils.set_random_seed(1)

    def dense(name):
        return keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)

    inner = keras.Sequential([keras.Input((1,)), dense("a")])
    outer = keras.Sequential([keras.Input((1,)), inner, dense("b"), dense("c")])
    return outer, inner


def step_of(net, optimizer, tape_options=None):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(x, training=True))
        if tape_options is not None:
            tape = hvd_tf.PartialDistributedGradientTape(tape, **tape_options)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))

    return step


LAYERS = {
    "a layer": lambda outer, inner: (outer.layers[1], {1}),
    "a list": lambda outer, inner: ([outer.layers[1], outer.layers[2]], {1, 2}),
    "a model": lambda outer, inner: (inner, {0}),
    "models and layers": lambda outer, inner: ((inner, outer.layers[2]), {0, 2}),
    "all": lambda outer, inner: (outer, {0, 1, 2}),
    "none": lambda outer, inner: (None, set()),
    "an empty list": lambda outer, inner: ([], set()),
}


@pytest.mark.parametrize(("mode", "scale"), [("function", True), ("eager", False)])
@pytest.mark.parametrize("who", ["optimizer", "tape"])
@pytest.mark.parametrize("layers", list(LAYERS))
def test_local_layers(layers, who, scale, mode, rank, size):
    net, inner = model()
    chosen, local = LAYERS[layers](net, inner)
    if who == "optimizer":
        optimizer = hvd.PartialDistributedOptimizer(
            O.SGD(0.25), op=hvd.Sum, groups=1, local_layers=chosen, scale_local_gradients=scale
        )
        step = step_of(net, optimizer)
    else:
        options = {"op": hvd.Sum, "groups": 1, "scale_local_gradients": scale}
        options["local_layers"] = chosen
        step = step_of(net, O.SGD(0.25), options)
    step = tf.function(step) if mode == "function" else step
    before = gradred.metrics().entries
    step(tf.constant([[rank + 1.0]]))
    if mode == "eager":  # a graph's first step also tells the others its order
        assert gradred.metrics().entries - before == 3 - len(local)
    for i, w in enumerate(net.get_weights()):
        gradient = size * (size + 1) / 2
        if i in local:
            gradient = (rank + 1.0) / (size if scale else 1)
        np.testing.assert_allclose(w, [[1 - 0.25 * gradient]], rtol=1e-6)


@BOTH
def test_layers_that_are_built_later(mode, rank, size):
    net = keras.Sequential(
        [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
    )
    optimizer = hvd.PartialDistributedOptimizer(
        O.SGD(1.0), op=hvd.Sum, local_layers=net.layers[1], scale_local_gradients=False
    )
    net.build((None, 1))
    step = step_of(net, optimizer)
    (tf.function(step) if mode == "function" else step)(tf.constant([[rank + 1.0]]))
    shared, local = (float(w[0, 0]) for w in net.get_weights())
    assert (shared, local) == (1.0 - size * (size + 1) / 2, -rank)


def test_what_is_no_layer_is_refused():
    for layers in (3, "dense", [tf.Variable(1.0)]):
        with pytest.raises(InvalidArgument, match="expected layers of Keras"):
            hvd.PartialDistributedOptimizer(O.SGD(0.1), local_layers=layers)
        with pytest.raises(InvalidArgument, match="expected layers of Keras"):
            hvd_tf.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layers)


def test_local_variables_in_fit_with_passes(rank, size):
    """register_local_var, of a variable of Keras and of the tf.Variable in it."""
    for inside in (False, True):
        net, _ = model()
        optimizer = hvd.DistributedOptimizer(
            O.SGD(0.25), op=hvd.Sum, backward_passes_per_step=2, average_aggregated_gradients=True
        )
        local = net.trainable_variables[1]
        optimizer.register_local_var(local.value if inside and KERAS_3 else local)
        net.compile(optimizer=optimizer, loss=lambda y, p: tf.reduce_sum(p))
        net.fit(np.full((2, 1), rank + 1.0), np.ones((2, 1)), batch_size=1, verbose=0)
        of_all, mine = size * (size + 1) / 2, (rank + 1.0) / size
        expected = [1 - 0.25 * g for g in (of_all, mine, of_all)]
        np.testing.assert_allclose([float(w[0, 0]) for w in net.get_weights()], expected, 1e-6)


@BOTH
def test_local_sources_of_a_tape(mode, rank, size):
    a, b, table = tf.Variable(1.0), tf.Variable(1.0), tf.Variable(tf.ones([3, 1]))

    def step():
        with tf.GradientTape() as tape:
            loss = (a + 2.0 * b + tf.reduce_sum(tf.gather(table, [rank]))) * (rank + 1.0)
        tape = hvd_tf.DistributedGradientTape(tape, op=hvd.Sum)
        tape.register_local_source(b)
        tape.register_local_source(table)
        local, others = tape.get_local_and_global_gradients(loss, [b, a, table])
        assert [s is v for (s, _), v in zip(local, [b, table], strict=True)] == [True, True]
        assert others[0][0] is a and len(others) == 1
        return local[0][1], others[0][1], tf.convert_to_tensor(local[1][1])

    of_b, of_a, of_table = (tf.function(step) if mode == "function" else step)()
    assert float(of_a) == size * (size + 1) / 2
    assert float(of_b) == np.float32(2.0 * (rank + 1)) / np.float32(size)
    assert float(of_table[rank, 0]) == np.float32(rank + 1) / np.float32(size)


# ---- process sets


@pytest.fixture(scope="module")
def sets(size):
    """Neighbours in a ring: with three ranks each is in two of three sets, which overlap."""
    return [hvd.add_process_set(sorted({r, (r + 1) % size})) for r in range(size)]


@pytest.mark.ranks(2, 3)
@BOTH
@pytest.mark.parametrize("who", ["optimizer", "tape"])
def test_overlapping_process_sets(who, mode, sets, rank, size):
    """All in one step: each variable is averaged over the ranks of its set."""
    variables = [tf.Variable(0.0) for _ in sets]
    mine = [i for i, s in enumerate(sets) if s.included()]
    optimizers = {i: O.SGD(1.0) for i in mine}
    if who == "optimizer":
        for i in mine:
            hvd.DistributedOptimizer(optimizers[i], process_set=sets[i])
    for i in mine:
        optimizers[i].build([variables[i]])

    def step():
        with tf.GradientTape(persistent=True) as tape:
            losses = {i: variables[i] * (10.0**i) * (rank + 1) for i in mine}
        for i in mine:
            if who == "tape":
                with tf.GradientTape() as one:
                    loss = variables[i] * (10.0**i) * (rank + 1)
                distributed = hvd_tf.DistributedGradientTape(one, process_set=sets[i])
                gradients = distributed.gradient(loss, [variables[i]])
            else:
                gradients = tape.gradient(losses[i], [variables[i]])
            optimizers[i].apply_gradients(zip(gradients, [variables[i]], strict=True))

    run = tf.function(step, autograph=False) if mode == "function" else step
    for n in range(1, 4):
        run()
        for i in mine:
            mean = sum(r + 1 for r in sets[i].ranks) / len(sets[i].ranks)
            assert float(variables[i]) == -n * 10.0**i * mean


@pytest.mark.ranks(3)
@BOTH
def test_a_rank_that_is_no_member(mode, sets, rank):
    outside = next(s for s in sets if not s.included())
    v = tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), process_set=outside)
    optimizer.build([v])

    def with_optimizer():
        optimizer.apply_gradients([(tf.constant(1.0), v)])

    def with_tape():
        with tf.GradientTape() as tape:
            loss = v * 2.0
        return hvd_tf.DistributedGradientTape(tape, process_set=outside).gradient(loss, v)

    for step in (with_optimizer, with_tape):
        run = tf.function(step, autograph=False) if mode == "function" else step
        with pytest.raises(InvalidArgument, match=f"rank {rank} is no member of process set"):
            run()
    assert float(v) == 1.0


def test_a_process_set_that_is_not_registered():
    v = tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), process_set=hvd.ProcessSet([0]))
    optimizer.build([v])
    with pytest.raises(InvalidArgument, match="is not registered"):
        optimizer.apply_gradients([(tf.constant(1.0), v)])
    assert_same_on_all_ranks([np.ones(1)])  # nobody waits for anybody
