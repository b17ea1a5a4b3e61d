"""L-BFGS over the ranks, against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

import gradred
import tensorflow as tf
from gradred import diff
from gradred.errors import Abandoned, Error, InvalidArgument, Mismatch
from gradred.pde import FlatVariables, LbfgsState, minimize_lbfgs

pytestmark = pytest.mark.ranks(2, 3, 4)


def rosenbrock(x):
    """Value and gradient of this rank's terms of the sum."""
    first = np.arange(x.size - 1) % gradred.size() == gradred.rank()
    a, b = x[:-1], x[1:]
    value = np.sum((100 * (b - a**2) ** 2 + (1 - a) ** 2)[first])
    gradient = np.zeros_like(x)
    gradient[:-1] += (-400 * a * (b - a**2) - 2 * (1 - a)) * first
    gradient[1:] += 200 * (b - a**2) * first
    return value, gradient


def start():
    return np.tile([-1.2, 1.0], 8)


def test_reaches_scipys_minimum_with_as_much_work():
    state = minimize_lbfgs(
        rosenbrock, start(), iterations=400, gradient_tolerance=1e-8, value_tolerance=0
    )
    assert state.converged
    np.testing.assert_allclose(state.x, 1.0, atol=1e-8)
    theirs = scipy.optimize.minimize(
        scipy.optimize.rosen,
        start(),
        jac=scipy.optimize.rosen_der,
        method="L-BFGS-B",
        options=dict(gtol=1e-8, ftol=0, maxiter=400),
    )
    assert state.evaluations <= 1.3 * theirs.nfev


def test_iterates_are_the_same_on_all_ranks_and_a_restart_goes_on(tmp_path):
    iterates = []
    whole = minimize_lbfgs(
        rosenbrock, start(), iterations=20, callback=lambda s: iterates.append(s.x.copy())
    )
    assert len(iterates) == 20
    for theirs in gradred.allgather_object(np.array(iterates)):
        np.testing.assert_array_equal(theirs, iterates)
    half = minimize_lbfgs(rosenbrock, start(), iterations=8)
    path = tmp_path / "state.npz"
    half.save(path)
    rest = minimize_lbfgs(rosenbrock, LbfgsState.load(path), iterations=12)
    np.testing.assert_array_equal(rest.x, whole.x)
    assert (rest.iterations, rest.evaluations) == (20, whole.evaluations)


def test_the_first_ranks_start_counts():
    state = minimize_lbfgs(rosenbrock, start() + gradred.rank(), iterations=0)
    np.testing.assert_array_equal(state.x, start())


def test_a_value_that_is_not_finite_ahead_shortens_the_step():
    def barrier(x):
        with np.errstate(all="ignore"):
            value = np.sum(x - np.log(x)) / gradred.size()
            return float(value), (1 - 1 / x) / gradred.size()

    state = minimize_lbfgs(barrier, np.full(4, 30.0))
    assert state.converged
    np.testing.assert_allclose(state.x, 1.0, atol=1e-5)


def test_bad_input_is_refused_on_all_ranks():
    with pytest.raises(InvalidArgument, match="not finite at the start"):
        minimize_lbfgs(lambda x: (np.inf, x), np.ones(3))
    with pytest.raises(InvalidArgument, match="one dimension"):
        minimize_lbfgs(rosenbrock, np.ones((2, 2)))
    with pytest.raises(InvalidArgument, match=r"gradient has shape \(2,\), expected \(3,\)"):
        minimize_lbfgs(lambda x: (1.0, x[:2]), np.ones(3))
    last = gradred.size() - 1
    mine = gradred.rank() == last
    with pytest.raises(InvalidArgument, match=rf"rank {last}: memory must be at least 1"):
        minimize_lbfgs(rosenbrock, np.ones(3), memory=0 if mine else 1)
    with pytest.raises(Mismatch, match=rf"rank 0: \(5, 10, .*rank {last}: \(6, 10, .*iterations"):
        minimize_lbfgs(rosenbrock, np.ones(3), iterations=6 if mine else 5)


def test_a_share_that_fails_on_one_rank_fails_on_all():
    """In the second evaluation, on the last rank; then all go on."""
    last = gradred.rank() == gradred.size() - 1
    calls = []

    def share(x):
        calls.append(x)
        if last and len(calls) == 2:
            raise ValueError("no wave today")
        return rosenbrock(x)

    expected = ValueError if last else Abandoned
    text = "no wave" if last else rf"evaluation 2 .* rank {gradred.size() - 1}: ValueError: no wave"
    with pytest.raises(expected, match=text):
        minimize_lbfgs(share, start())

    def narrow(x):
        return 1.0, x[: 2 if last else 3]

    expected = InvalidArgument if last else Abandoned
    with pytest.raises(expected, match=r"gradient has shape \(2,\), expected \(3,\)"):
        minimize_lbfgs(narrow, np.ones(3))
    assert minimize_lbfgs(rosenbrock, start(), iterations=2).iterations == 2


def test_a_callback_that_fails_on_one_rank_fails_on_all():
    """Given on that rank alone, or on all."""
    last = gradred.rank() == gradred.size() - 1

    def callback(state):
        if last and state.iterations == 3:
            raise OSError("the disk is full")

    expected = OSError if last else Abandoned
    text = "disk" if last else rf"callback 3 .* rank {gradred.size() - 1}: OSError: the disk is"
    for given in (callback, callback if last else None):
        with pytest.raises(expected, match=text):
            minimize_lbfgs(rosenbrock, start(), callback=given)


@pytest.mark.smoke
@pytest.mark.parametrize("where", ["eager", "graph", "first", "callback"])
def test_who_waits_in_the_graph_for_a_share_that_fails(where):
    """Before, between and behind operations of gradred.diff; the others name rank and text."""
    rank, last = gradred.rank(), gradred.size() - 1
    context = diff.Context(dims=[gradred.size()], name="share")
    evaluations = []

    def fails(at, *kinds):
        return rank == last and where in kinds and len(evaluations) == at

    def value_of(x, wrong):
        loss = diff.psum(tf.reduce_sum((x - 1.0) ** 2), context)
        if where == "graph":
            loss = tf.debugging.check_numerics(loss / (1.0 - wrong), "no wave today")
        elif wrong:
            raise ValueError("no wave today")
        return context.end(diff.shift(loss, context) + loss)

    traced = tf.function(value_of) if where == "graph" else value_of

    def share(x):
        evaluations.append(x)
        if fails(1, "first"):
            raise ValueError("no wave today")
        y = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(y)
            loss = traced(y, tf.constant(float(fails(2, "eager", "graph")), tf.float64))
        return float(loss), tape.gradient(loss, y).numpy()

    def callback(state):
        if fails(state.evaluations, "callback"):
            raise ValueError("no wave today")
        diff.barrier(context)

    with pytest.raises(Exception) as raised:
        minimize_lbfgs(share, np.arange(3.0), callback=callback)
    assert "no wave today" in str(raised.value)
    if rank != last:
        what = "callback 1" if where == "callback" else rf"evaluation {1 + (where != 'first')}"
        assert f"rank {last}: {what} of minimize_lbfgs in context 'share'" in str(raised.value)
    with pytest.raises(Error, match=f"rank {last}: .* in context 'share': .*no wave today"):
        diff.barrier(context)
    context.close()


def test_what_an_operation_has_told_ends_no_context():
    last = gradred.size() - 1
    context = diff.Context(name="told")

    def share(x):
        op = "sum" if gradred.rank() != last else "avg"
        return float(diff.allreduce(tf.reduce_sum(x), context, op)), x

    with pytest.raises(InvalidArgument, match="op='avg'"):
        minimize_lbfgs(share, np.ones(2))
    assert diff.allreduce(tf.ones([]), context) == gradred.size()
    context.close()


@pytest.mark.smoke
@pytest.mark.ranks(2)
def test_variables_of_keras_as_one_vector():
    """And TensorFlow's, halves, sparse gradients, and what has no gradient."""
    import keras

    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    half, table = tf.Variable([1.5], dtype=tf.float16), tf.Variable(tf.zeros([4, 2]))
    flat = FlatVariables([*layer.trainable_variables, half, table])
    x = np.arange(17.0)
    flat.set(x)
    np.testing.assert_array_equal(flat.get(), x)
    np.testing.assert_array_equal(layer(tf.ones([1, 3])), [[6 + 0 + 2 + 4, 7 + 1 + 3 + 5]])
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.gather(table, [1, 1])) + tf.reduce_sum(layer(tf.ones([1, 3])))
    gradients = tape.gradient(value, [*layer.trainable_variables, half, table])
    expected = [*[1] * 8, 0, 0, 0, 2, 2, 0, 0, 0, 0]
    np.testing.assert_array_equal(flat.flatten(gradients), expected)
    flat = FlatVariables([tf.Variable([0.0, 0.0]), tf.Variable(0.0, dtype=tf.bfloat16)])
    values = [[1 / 3, 0.1], tf.constant(0.5, tf.bfloat16)]
    assert flat.flatten(values).tolist() == [1 / 3, 0.1, 0.5]
    assert flat.get().tolist() == [0, 0, 0]
