"""Optimizers of tf.compat.v1.train, in sessions, functions and eager mode."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import gradred
import gradred.tensorflow as hvd
import tensorflow as tf
from gradred.errors import InvalidArgument

pytestmark = [pytest.mark.ranks(2), pytest.mark.smoke]

v1 = tf.compat.v1


def means(rank, size):
    return 1.0 + (size - 1) / 2


def test_slots_and_variables_in_a_session(rank, size):
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [2])
        v = v1.get_variable("v", initializer=np.float32([1, 1]), use_resource=True)
        plain = v1.train.MomentumOptimizer(0.25, 0.5)
        optimizer = hvd.DistributedOptimizer(plain, use_locking=True, device_dense="/cpu:0")
        assert optimizer is plain and isinstance(optimizer, v1.train.MomentumOptimizer)
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(tf.reduce_sum(v * x), global_step=step, var_list=[v])
        assert optimizer.get_slot_names() == ["momentum"]
        slot = optimizer.get_slot(v, "momentum")
        assert slot in optimizer.variables()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            momentum, expected = np.zeros(2), np.ones(2)
            for i in range(3):
                session.run(train, {x: [1.0 + rank, 2.0 * i]})
                momentum = 0.5 * momentum + [means(rank, size), 2.0 * i]
                expected = expected - 0.25 * momentum
            np.testing.assert_allclose(session.run([v, slot]), [expected, momentum], rtol=1e-6)
            assert session.run(step) == 3


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("mode", ["session", "function", "eager"])
@pytest.mark.parametrize("passes", [1, 2])
def test_clipping_between(passes, mode, rank, size):
    """What is clipped is the reduced gradient."""

    def optimizer_and_variables():
        v = v1.get_variable("v", initializer=np.float32([0.0]), use_resource=True)
        table = v1.get_variable("t", initializer=np.zeros([4, 1], np.float32), use_resource=True)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.5), op=hvd.Sum, backward_passes_per_step=passes
        )
        return optimizer, v, table

    def update(optimizer, v, table, x):
        def loss():
            return tf.reduce_sum(v * x) + tf.reduce_sum(tf.gather(table, [1, 1, rank]))

        loss = loss() if mode == "session" else loss
        pairs = optimizer.compute_gradients(loss, var_list=[v, table])
        clipped = [(tf.clip_by_value(tf.convert_to_tensor(g), -8.0, 8.0), w) for g, w in pairs]
        return optimizer.apply_gradients(clipped)

    inputs = [float(rank + 1), 2.0 * rank, 0.25, 16.0]
    if mode == "session":
        with tf.Graph().as_default():
            optimizer, v, table = optimizer_and_variables()
            x = v1.placeholder(tf.float32, [])
            train = update(optimizer, v, table, x)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for value in inputs:
                    assert session.run(train, {x: value}) is None
                of_v, of_table = session.run([v, table])
    else:
        optimizer, v, table = optimizer_and_variables()

        def step(value):
            update(optimizer, v, table, value)

        run = tf.function(step) if mode == "function" else step
        for value in inputs:
            run(tf.constant(value))
        of_v, of_table = v.numpy(), table.numpy()

    of_ranks = np.array([[r + 1.0, 2.0 * r, 0.25, 16.0] for r in range(size)])
    updates = of_ranks.sum(0).reshape(-1, passes).sum(1)
    np.testing.assert_array_equal(of_v, [-0.5 * np.minimum(updates, 8.0).sum()])
    rows = np.zeros(4)
    for r in range(size):
        np.add.at(rows, [1, 1, r], passes)
    np.testing.assert_array_equal(of_table[:, 0], -0.5 * (4 // passes) * np.minimum(rows, 8.0))


@pytest.mark.parametrize("kind", ["two losses", "one loss twice", "in a branch"])
def test_computed_gradients_are_not_reduced_again(kind, rank, size):
    """S2: wherever and in whatever order they are applied."""
    with tf.Graph().as_default():
        a, b = (v1.get_variable(n, initializer=np.float32(0.0), use_resource=True) for n in "ab")
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum)
        second = a if kind == "one loss twice" else b
        pairs = [optimizer.compute_gradients(v * (rank + 1.0), [v]) for v in (a, second)]
        if kind == "in a branch":
            yes = v1.placeholder_with_default(True, [])
            both = pairs[0] + pairs[1]

            def apply():
                with tf.control_dependencies([optimizer.apply_gradients(both)]):
                    return tf.constant(1)

            train = [tf.cond(yes, apply, lambda: tf.constant(0))]
        else:
            train = [optimizer.apply_gradients(some) for some in pairs]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train)
            total = -size * (size + 1) / 2
            expected = [2 * total, 0.0] if kind == "one loss twice" else [total, total]
            assert session.run([a, b]) == expected


def test_passes_are_saved_with_a_session(rank, size, tmp_path):
    """Also the global step counts updates."""
    path = str(tmp_path / "saved")
    values = []
    for part in ((1.0, 2.0), (3.0, 4.0, 5.0)):
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, [])
            v = v1.get_variable("v", initializer=np.float32(0.0), use_resource=True)
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum, backward_passes_per_step=3
            )
            step = v1.train.get_or_create_global_step()
            train = optimizer.minimize(v * x, global_step=step)
            saver = v1.train.Saver()
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                if values:
                    saver.restore(session, path)
                for value in part:
                    session.run(train, {x: value * (rank + 1)})
                    values.append(session.run([v, step]))
                saver.save(session, path, write_meta_graph=False)
    total = size * (size + 1) / 2
    assert [float(value) for value, _ in values] == [0, 0, -6 * total, -6 * total, -6 * total]
    assert [int(step) for _, step in values] == [0, 0, 1, 1, 1]


def test_a_monitored_session(rank, size):
    with tf.Graph().as_default():
        v = v1.get_variable("v", initializer=np.float32(rank), use_resource=True)
        optimizer = hvd.DistributedOptimizer(
            v1.train.AdamOptimizer(0.5), backward_passes_per_step=2
        )
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(v * (rank + 1.0), global_step=step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=2)]
        runs = 0
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            while not session.should_stop():
                result = session.run([train, v])[1]
                runs += 1
    assert runs == 4
    everyone = gradred.allgather(np.array([result]), name="results")
    np.testing.assert_array_equal(everyone, everyone[:1].repeat(size))
    assert -1.1 < result < -0.4


def test_graphs_that_are_gone_leave_nothing(rank, size):
    def train():
        with tf.Graph().as_default(), v1.Session() as session:
            v = v1.get_variable("v", initializer=np.float32(0.0), use_resource=True)
            plain = v1.train.GradientDescentOptimizer(1.0)
            train = hvd.DistributedOptimizer(plain, name="short-lived").minimize(v * 1.0)
            session.run(v1.global_variables_initializer())
            session.run(train)
            assert "optimizer:short-lived" in gradred.plan()

    for _ in range(2):
        train()
        gc.collect()
        assert "optimizer:short-lived" not in gradred.plan()


@pytest.mark.parametrize("mode", ["function", "eager"])
def test_gradients_of_a_tape_are_reduced_where_they_are_applied(mode, rank, size):
    """S2"""
    v = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Sum)

    def step(distributed=False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v) * (rank + 1.0)
        tape = hvd.DistributedGradientTape(tape) if distributed else tape
        optimizer.apply_gradients(zip(tape.gradient(loss, [v]), [v], strict=True))

    run = tf.function(step, autograph=False) if mode == "function" else step
    run()
    run()
    np.testing.assert_array_equal(v, [1.0 - size * (size + 1) / 2])
    with pytest.raises(InvalidArgument, match="use one of the two"):
        run(True)


def test_no_pairs_is_tensorflows_own_error():
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
    with pytest.raises(ValueError, match="No variables provided"):
        optimizer.apply_gradients([])


def test_wrapping_twice_is_refused():
    """H9"""
    optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.1))
    with pytest.raises(InvalidArgument, match="AdamOptimizer is distributed already"):
        hvd.DistributedOptimizer(optimizer)


def test_local_variables(rank, size):
    with tf.Graph().as_default():
        a, b = (v1.get_variable(n, initializer=np.float32(0.0), use_resource=True) for n in "ab")
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum, scale_local_gradients=False
        )
        optimizer.register_local_var(b)
        train = optimizer.minimize((a + b) * (rank + 1.0))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train)
            assert session.run([a, b]) == [-size * (size + 1) / 2, -(rank + 1)]
