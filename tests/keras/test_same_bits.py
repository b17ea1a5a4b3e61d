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
    fit,
    keras,
    loop,
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
    return [1, 2, "layer", "100B", None, [[v[4], v[1]], [v[0], v[5]]], [[v[2]], [v[3], v[0]]]]


def train(rank, size, which, policy="float32"):
    """The bytes of the weights after five steps of Adam with the groups number `which`."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = net("float32") if policy == "float32" else net(policy)
        groups = shuffled_groups(model)[which]
        compression = hvd.Compression.bf16 if policy == "mixed_bfloat16" else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(O.Adam(0.01), groups=groups, compression=compression)
        fit(model, optimizer, my_rows(rank, size), ROWS // size)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return weights(model)


def assert_same_bits(results):
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_shuffled_groups(policy, rank, size):
    results = [train(rank, size, which, policy) for which in (0, 5, 1, 6, 2, 3, 4, 5)]
    assert_same_bits(results)
    assert_same_on_all_ranks(results[0])


@pytest.mark.parametrize("nodes", ["2", "3"])
def test_virtual_nodes(nodes, rank, size, monkeypatch):
    """Nodes of unequal size; other sums than on one node, up to rounding."""
    one_node = train(rank, size, 0)
    gradred.shutdown()
    monkeypatch.setenv("GRADRED_VIRTUAL_NODES", nodes)
    gradred.init()
    try:
        assert gradred.cross_size() > 1 or gradred.local_size() < size
        results = [train(rank, size, which) for which in (0, 5, 1, 4, 0)]
    finally:
        gradred.shutdown()
        monkeypatch.delenv("GRADRED_VIRTUAL_NODES")
        gradred.init()
    assert_same_bits(results)
    assert_same_on_all_ranks(results[0])
    assert_close(results[0], one_node, 1e-5)


def test_ranks_that_come_late(rank, size):
    """Another rank is late in each step, and in each run another one."""
    results = []
    for run in range(3):
        model = net("float32")
        optimizer = hvd.DistributedOptimizer(O.SGD(0.05, momentum=0.9), groups=3)
        x, y = data()
        rows, batch = my_rows(rank, size), ROWS // size

        @tf.function
        def step(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = mse(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for i in range(STEPS):
            if (i + run) % size == rank:
                time.sleep(0.02)
            part = rows[i * batch : (i + 1) * batch]
            step(tf.constant(x[part]), tf.constant(y[part]))
        results.append(weights(model))
    assert_same_bits(results)


def test_eager_and_graph_tapes(rank, size):
    """Groups in the order of the graph and in the order of the list: the same sums."""
    results = []
    for mode in ("function", "eager", "function"):
        model = net("float32")
        loop(model, O.SGD(0.05), my_rows(rank, size), ROWS // size, mode, distributed_tape=True)
        results.append(weights(model))
    assert_close(results[1], results[0], 1e-6)
    assert_same_bits([results[0], results[2]])


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
