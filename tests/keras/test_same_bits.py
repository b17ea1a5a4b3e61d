"""P4: the same training gives the same bits, whatever the groups and whenever gradients come."""

from __future__ import annotations

import time

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
import tensorflow as tf
from harness.training import (
    ROWS,
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    data,
    keras,
    mse,
    my_rows,
    net,
    weights,
)

pytestmark = pytest.mark.ranks(3, deadline=120)

O = keras.optimizers  # noqa: E741


def shuffled_groups(model):
    """Groups of all kinds, among them lists that have nothing to do with the backward pass."""
    v = model.trainable_variables
    return {
        "one": 1,
        "two": 2,
        "layer": "layer",
        "bytes": "100B",
        "lists": [[v[4], v[1]], [v[0], v[5]]],
        "other lists": [[v[2]], [v[3], v[0]]],
    }


def train(rank, size, groups, wire="none", optimizer=lambda: O.Adam(0.01), late=None):
    """The weights after five steps; late(step): whether this rank comes late to a step."""
    model = net("float32")
    optimizer = hvd.DistributedOptimizer(
        optimizer(),
        groups=shuffled_groups(model)[groups],
        compression=getattr(hvd.Compression, wire),
    )
    x, y = data()
    rows, batch = my_rows(rank, size), ROWS // size

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for i in range(STEPS):
        if late is not None and late(i):
            time.sleep(0.02)
        part = rows[i * batch : (i + 1) * batch]
        step(tf.constant(x[part]), tf.constant(y[part]))
    return weights(model)


def assert_same_bits(results):
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


def test_shuffled_groups(rank, size):
    results = []
    for run, groups in enumerate(("one", "lists", "two", "other lists", "layer", "bytes", "one")):
        # In each step another rank comes late, and in each run another one to that step.
        late = lambda step, run=run: (step + run) % size == rank  # noqa: E731
        results.append(train(rank, size, groups, late=late))
    assert_same_bits(results)
    assert_same_on_all_ranks(results[0])


def test_half_wires(rank, size):
    results = [train(rank, size, groups, "bf16") for groups in ("one", "lists", "one")]
    assert_same_bits(results)
    assert_same_on_all_ranks(results[0])


def test_virtual_nodes(rank, size, monkeypatch):
    """Nodes of unequal size; other sums than on one node, up to rounding."""

    def sgd():  # Adam's first steps turn the rounding of tiny gradients into large ones
        return O.SGD(0.05, momentum=0.9)

    one_node = train(rank, size, "one", optimizer=sgd)
    gradred.shutdown()
    monkeypatch.setenv("GRADRED_VIRTUAL_NODES", "2")
    gradred.init()
    try:
        assert gradred.local_size() < size
        results = [train(rank, size, g, optimizer=sgd) for g in ("one", "lists", "two", "one")]
    finally:
        gradred.shutdown()
        monkeypatch.delenv("GRADRED_VIRTUAL_NODES")
        gradred.init()
    assert_same_bits(results)
    assert_same_on_all_ranks(results[0])
    assert_close(results[0], one_node, 1e-5)


def test_arrays_of_a_wide_range(rank, size):
    """Sums that depend on their order: 1, 1e8 and -1e8, in groups of all kinds."""
    generator = np.random.default_rng([5, rank])
    arrays = [
        (generator.normal(size=n) * 10.0 ** generator.integers(-8, 8, n)).astype(np.float32)
        for n in (1, 3, 1000, 1025, 70_001)
    ]
    alone = [gradred.allreduce(a, gradred.Sum, name=f"alone.{i}") for i, a in enumerate(arrays)]
    together = gradred.grouped_allreduce(arrays, gradred.Sum, name="together")
    backwards = gradred.grouped_allreduce(arrays[::-1], gradred.Sum, name="backwards")[::-1]
    assert_same_bits([alone, together, backwards, alone])
    assert_same_on_all_ranks(together, "together")
