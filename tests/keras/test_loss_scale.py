"""H8: float16, loss scaling, and a gradient that is not finite on one rank."""

from __future__ import annotations

import numpy as np
import pytest

import gradred.keras as hvd
from harness.training import KERAS_3, assert_same_on_all_ranks, keras, scale_of, steps_of

pytestmark = [pytest.mark.ranks(2, 3, deadline=120), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741
Scale = keras.mixed_precision.LossScaleOptimizer


@pytest.fixture(params=["float32", "mixed_float16"])
def policy(request):
    keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    keras.mixed_precision.set_global_policy("float32")


ORDERS = {
    "scale outside": lambda: Scale(hvd.DistributedOptimizer(O.SGD(0.05)), initial_scale=8.0),
    "scale inside": lambda: hvd.DistributedOptimizer(Scale(O.SGD(0.05), initial_scale=8.0)),
    "compile wraps": lambda: hvd.DistributedOptimizer(O.SGD(0.05)),
}


def sizes(order):
    """That a third rank skips as well does not depend on who wraps whom."""
    more = (3,) if order == "scale inside" else ()
    return pytest.mark.ranks(2, *more, deadline=120)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("order", [pytest.param(order, marks=sizes(order)) for order in ORDERS])
def test_all_ranks_skip_the_same_steps(order, eager, policy, rank, size):
    if order == "compile wraps" and policy != "mixed_float16":
        pytest.skip("compile() wraps under mixed_float16 alone")
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer=ORDERS[order](), loss="mse", run_eagerly=eager)
    optimizer = model.optimizer
    assert isinstance(optimizer, Scale)
    # Small: Keras' first scale is 2^15, and no step but those below shall overflow.
    x, y = np.full((2, 4), 2**-8, np.float32), np.zeros((2, 1), np.float32)
    model.fit(x * (rank + 1), y, verbose=0)
    scale, steps = scale_of(optimizer), steps_of(optimizer)
    for culprit in range(size):
        before = [w.copy() for w in model.get_weights()]
        bad = x.copy()
        if rank == culprit:
            bad[0, 0] = np.inf
        model.fit(bad, y, verbose=0)
        for a, b in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)  # skipped, on every rank
        scale /= 2
        assert scale_of(optimizer) == scale
    before = [w.copy() for w in model.get_weights()]
    model.fit(x * (rank + 1), y, verbose=0)
    assert scale_of(optimizer) == scale
    if KERAS_3:
        assert steps_of(optimizer) == steps + 1
    assert any(np.abs(a - b).max() > 0 for a, b in zip(before, model.get_weights(), strict=True))
    assert_same_on_all_ranks(model.get_weights())


def test_a_fixed_scale(policy, rank, size):
    """Nothing is skipped; what is not finite reaches all ranks alike."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    if KERAS_3:
        optimizer = hvd.DistributedOptimizer(O.SGD(0.05, loss_scale_factor=128.0))
        model.compile(optimizer=optimizer, loss="mse", auto_scale_loss=False)
    else:
        optimizer = Scale(O.SGD(0.05), dynamic=False, initial_scale=128.0)
        model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
    x, y = np.ones((2, 4), np.float32), np.zeros((2, 1), np.float32)
    model.fit(x * (rank + 1), y, verbose=0)
    assert_same_on_all_ranks(model.get_weights())
    x[0, 0] = np.inf if rank == size - 1 else 1.0
    model.fit(x, y, verbose=0)
    finite = np.float64([np.isfinite(w).all() for w in model.get_weights()])
    assert_same_on_all_ranks([finite])


def test_a_plain_loss_scale_optimizer_is_as_it_was(rank, size):
    """The hook that H8 needs leaves optimizers that are not distributed alone."""
    hvd.DistributedOptimizer(O.SGD(0.05))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer=Scale(O.SGD(0.05), initial_scale=8.0), loss="mse")
    if rank == 0:  # alone: nobody is waited for
        model.fit(np.ones((2, 4), np.float32), np.zeros((2, 1), np.float32), verbose=0)
        assert steps_of(model.optimizer) == 1


def test_gradient_clipping_sees_unscaled_gradients(rank, size):
    results = []
    for make in (
        lambda o: o,
        lambda o: hvd.DistributedOptimizer(o),
        None,
    ):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        base = O.SGD(0.05, global_clipnorm=0.1)
        if make is None:
            optimizer = Scale(hvd.DistributedOptimizer(base), initial_scale=64.0)
        else:
            optimizer = make(Scale(base, initial_scale=64.0))
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(np.ones((2, 4), np.float32), np.zeros((2, 1), np.float32), verbose=0)
        results.append(model.get_weights())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
