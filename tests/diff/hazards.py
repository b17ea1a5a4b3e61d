"""Programs in which TensorFlow alone would not keep the order of communication on all ranks.

Each is run in the tests' job, and as a program of its own with one inter-op thread.
"""

from __future__ import annotations

import threading
import time

import numpy as np

import tensorflow as tf
from gradred import diff
from gradred.diff import Context


def delayed(x, context, salt):
    """``x``, late: by another time on each rank and in each run."""
    generator = np.random.default_rng([salt, context.rank])

    def late(value):
        time.sleep(generator.random() * 0.01)
        return value

    waited = tf.numpy_function(late, [tf.stop_gradient(x)], x.dtype)
    waited.set_shape(x.shape)
    return x + (waited - tf.stop_gradient(x))


def two_sums(x, z, context):
    """Two reductions of different sizes that do not depend on each other."""
    a = diff.allreduce(delayed(2.0 * x, context, 1), context)
    b = diff.allreduce(delayed(3.0 * z, context, 2), context)
    return tf.reduce_sum(a * a), tf.reduce_sum(b * b)


def inputs(context):
    x = tf.Variable(np.arange(4.0) + context.rank)
    z = tf.Variable(np.arange(6.0) - context.rank)
    size = context.size
    total_x = size * np.arange(4.0) + size * (size - 1) / 2
    total_z = size * np.arange(6.0) - size * (size - 1) / 2
    return x, z, 8 * size * total_x, 18 * size * total_z


def check_independent(context):
    x, z, gx, gz = inputs(context)

    def loss():
        return context.end(sum(two_sums(x, z, context)))

    def gradients(function):
        with tf.GradientTape() as tape:
            value = function()
        return tape.gradient(value, [x, z])

    outside = tf.function(loss)
    inside = tf.function(lambda: gradients(loss))
    for run in (lambda: gradients(loss), inside, lambda: gradients(outside)):
        for _ in range(3):
            a, b = run()
            np.testing.assert_allclose(a, gx, rtol=1e-14)
            np.testing.assert_allclose(b, gz, rtol=1e-14)


def check_persistent(context):
    """Two gradients of one tape, of two targets."""
    x, z, gx, gz = inputs(context)

    def losses():
        return context.end(two_sums(x, z, context))

    def gradients(function):
        with tf.GradientTape(persistent=True) as tape:
            one, two = function()
        return [tape.gradient(t, [x, z], unconnected_gradients="zero") for t in (one, two)]

    outside, inside = tf.function(losses), tf.function(lambda: gradients(losses))
    for run in (inside, lambda: gradients(outside)):
        for _ in range(3):
            (a, nothing), (also_nothing, b) = run()
            np.testing.assert_allclose(a, gx, rtol=1e-14)
            np.testing.assert_allclose(b, gz, rtol=1e-14)
            assert not nothing.numpy().any() and not also_nothing.numpy().any()


def check_second_order(context):
    """The outer tape inside of the function, and outside."""
    x, z, gx, gz = inputs(context)

    def first():
        with tf.GradientTape() as inner:
            context.begin(x, z)
            loss = context.end(sum(two_sums(x, z, context)))
        a, b = inner.gradient(loss, [x, z])
        return context.end(tf.reduce_sum(a * a) + tf.reduce_sum(b * b))

    def second(function):
        with tf.GradientTape() as outer:
            norm = function()
        return outer.gradient(norm, [x, z])

    outside, inside = tf.function(first), tf.function(lambda: second(first))
    size = context.size
    for run in (inside, lambda: second(outside)):
        for _ in range(2):
            a, b = run()
            np.testing.assert_allclose(a, 16 * size**2 * gx, rtol=1e-13)
            np.testing.assert_allclose(b, 36 * size**2 * gz, rtol=1e-13)


def check_pipeline(context):
    """Messages from rank to rank; only the last has a loss."""
    rank, size = context.rank, context.size
    weight = tf.Variable(2.0, dtype=tf.float64)

    @tf.function
    def loss():
        context.begin(weight)
        x = tf.ones([3], tf.float64)
        if rank > 0:
            x = diff.recv(x, context, rank - 1)
        x = delayed(x * weight, context, 3)
        if rank < size - 1:
            diff.send(x, context, rank + 1)
            return context.end(tf.zeros([], tf.float64))
        return context.end(tf.reduce_sum(x))

    for _ in range(3):
        with tf.GradientTape() as tape:
            value = loss()
        gradient = tape.gradient(value, weight, unconnected_gradients="zero")
        assert gradient == 3 * 2.0 ** (size - 1)
    assert value == (3 * 2.0**size if rank == size - 1 else 0)


def check_overflow(context):
    """Fields that overflow do not reach what does not depend on them."""
    x = tf.Variable(tf.fill([4], tf.constant(60000.0, tf.float16)))

    @tf.function
    def loss():
        context.begin(x)
        infinite = diff.allreduce(diff.allreduce(x * 2.0, context), context)
        mean = diff.allreduce(x, context, "mean")
        return context.end(tf.reduce_sum(mean / 60000.0)), context.end(infinite)

    with tf.GradientTape() as tape:
        value, infinite = loss()
    assert np.isinf(infinite.numpy()).all()
    np.testing.assert_allclose(value, 4.0, rtol=1e-2)
    gradient = tape.gradient(value, x).numpy()
    np.testing.assert_allclose(gradient, np.float16(1 / 60000), rtol=1e-2)


def check_constant_and_unused(context):
    """What does not change and what nobody uses runs each time."""

    @tf.function
    def function(x):
        diff.allreduce(x * 2.0, context)
        return x + diff.allreduce(tf.ones([4]), context)

    for i in range(3):
        y = function(tf.fill([4], float(i)))
        np.testing.assert_array_equal(y, [i + context.size] * 4)


def check_with_engine(context):
    """Both systems in one step, the gradient reduction on top of communication in the graph."""
    import gradred.tensorflow as hvd

    x, z, gx, gz = inputs(context)

    @tf.function
    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            one, two = two_sums(x, z, context)
            loss = context.end(one + two)
        return tape.gradient(loss, [x, z])

    for _ in range(3):
        a, b = step()
        np.testing.assert_allclose(a, context.size * gx, rtol=1e-14)
        np.testing.assert_allclose(b, context.size * gz, rtol=1e-14)


def check_recomputed(context):
    """Operations that tf.recompute_grad runs again in the backward pass."""
    x, z, gx, gz = inputs(context)

    def part(x, z):
        context.begin(x, z)
        return context.end(sum(two_sums(x, z, context)))

    def gradients(function):
        with tf.GradientTape() as tape:
            loss = function()
        return tape.gradient(loss, [x, z])

    def loss():
        again = tf.recompute_grad(part)
        a, b = tf.convert_to_tensor(x), tf.convert_to_tensor(z)
        return context.end(again(a, b) + again(2.0 * a, b))

    outside, inside = tf.function(loss), tf.function(lambda: gradients(loss))
    for run in (lambda: gradients(loss), inside, lambda: gradients(outside)):
        a, b = run()
        np.testing.assert_allclose(a, 5 * gx, rtol=1e-14)
        np.testing.assert_allclose(b, 2 * gz, rtol=1e-14)


def check_calls_of_functions(context):
    """Functions of the context's, called from others and one after another."""
    x, z, gx, gz = inputs(context)

    @context.function
    def one(x):
        return tf.reduce_sum(diff.allreduce(delayed(2.0 * x, context, 4), context) ** 2)

    @context.function
    def two(z):
        return tf.reduce_sum(diff.allreduce(delayed(3.0 * z, context, 5), context) ** 2)

    def both():
        return context.end(one(tf.convert_to_tensor(x)) + two(tf.convert_to_tensor(z)))

    def gradients(function):
        with tf.GradientTape() as tape:
            loss = function()
        return tape.gradient(loss, [x, z])

    outside, inside = tf.function(both), tf.function(lambda: gradients(both))
    for run in (lambda: gradients(both), inside, lambda: gradients(outside)):
        for _ in range(2):
            a, b = run()
            np.testing.assert_allclose(a, gx, rtol=1e-14)
            np.testing.assert_allclose(b, gz, rtol=1e-14)


def check_two_contexts(context):
    """Two contexts whose operations come in another order on every other rank."""
    other = Context(name="other")
    pair = [context, other] if context.rank % 2 else [other, context]
    met = threading.Barrier(2)
    results = {}

    def run(mine):
        met.wait()
        results[mine.name] = [diff.allreduce(tf.ones([2]), mine).numpy()[0] for _ in range(5)]

    first = threading.Thread(target=run, args=(pair[0],))
    first.start()
    run(pair[1])
    first.join()
    for values in results.values():
        assert values == [context.size] * 5
    other.close()


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    import gradred

    gradred.init()
    assert tf.config.threading.get_inter_op_parallelism_threads() in (0, 1)
    everybody = Context(name="everybody")
    for check in CHECKS:
        check(everybody)
    print("passed", len(CHECKS))
