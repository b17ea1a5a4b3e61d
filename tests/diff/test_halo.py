"""Halo exchange as a node: values by NumPy's padding, adjoint, second derivative, errors."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import tensorflow as tf
from diff.cases import everywhere, random
from gradred import diff
from gradred.diff import Context, HaloPlan, halo_exchange

pytestmark = [pytest.mark.ranks(1, 2, 3, 4)]

_MODES = {"constant": "constant", "periodic": "wrap", "reflect": "reflect"}


@pytest.fixture(scope="module")
def grid():
    gradred.init()
    ranks = gradred.size()
    grid = Context(dims=(2, 2) if ranks == 4 else (1, ranks), name="grid")
    yield grid
    gradred.barrier()
    grid.close()


def whole_and_blocks(grid, shape):
    """A global array, where the blocks of this rank begin and end, and the blocks' sizes."""
    whole = np.random.default_rng(3).normal(size=shape)
    boxes = diff.grid_blocks(shape, grid.dims)
    sizes = [
        [n // k + (i < n % k) for i in range(k)] for n, k in zip(shape, grid.dims, strict=True)
    ]
    return whole, boxes[grid.rank], sizes


@pytest.mark.parametrize("boundary", list(_MODES))
def test_values_are_those_of_the_padded_array(boundary, grid):
    whole, box, sizes = whole_and_blocks(grid, (9, 13))
    widths = ((2, 1), (1, 3))
    padded = np.pad(whole, widths, _MODES[boundary])
    mine = whole[tuple(slice(*b) for b in box)]
    right = padded[tuple(slice(b, e + sum(w)) for (b, e), w in zip(box, widths, strict=True))]
    for blocks in (sizes, whole.shape):
        plan = HaloPlan(grid, blocks, widths, boundary)
        assert plan.block == mine.shape and plan.padded == right.shape
        for dtype in (tf.float64, tf.float32, tf.float16, tf.bfloat16):
            y = halo_exchange(tf.cast(mine, dtype), plan)
            np.testing.assert_array_equal(y, tf.cast(right, dtype))


def functions(grid):
    """Linear functions of a [6, 3] tensor."""
    corners = HaloPlan(
        grid, [[6] * grid.dims[0], [3] * grid.dims[1]], ((2, 1), (1, 2)), "symmetric"
    )
    star = HaloPlan(
        grid, [[6] * grid.dims[0], [3] * grid.dims[1]], 1, ["periodic", "constant"], corners=False
    )

    def two(x):
        a, b = halo_exchange([x, tf.stack([x, 2 * x], 2)], corners)
        return tf.concat([tf.reshape(a, [-1]), tf.reshape(b, [-1])], 0)

    def loop(x):
        def body(i, u):
            v = halo_exchange(u, star)
            return i + 1, u + 0.1 * (v[2:, 1:-1] + v[:-2, 1:-1] - 2 * v[1:-1, 2:])

        return grid.while_loop(lambda i, _: i < 3, body, (tf.constant(0), x))[1]

    return {
        "corners": lambda x: halo_exchange(x, corners),
        "star": lambda x: halo_exchange(x, star),
        "two fields": two,
        "batch": lambda x: halo_exchange(x[None], corners, axis=1),
        "loop": loop,
    }


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("corners", "eager"),
        ("corners", "tape outside"),
        ("star", "tape inside"),
        ("two fields", "eager"),
        ("two fields", "tape inside"),
        ("batch", "tape inside"),
        ("loop", "tape inside"),
        ("loop", "tape outside"),
    ],
)
def test_dot_products_agree(name, mode, grid, rank):
    function = functions(grid)[name]
    if mode == "tape outside":
        function = tf.function(function)

    def pull_back(x, weights):
        with tf.GradientTape() as outer:
            outer.watch(weights)
            grid.begin(x, weights)
            with tf.GradientTape() as tape:
                tape.watch(x)
                grid.begin(x)
                y = function(x)
            gradient = tape.gradient(y, x, weights)
            along = grid.end(tf.reduce_sum(gradient * tf.sin(x)))
        return y, gradient, outer.gradient(along, weights)

    if mode == "tape inside":
        pull_back = tf.function(pull_back)
    x = random((6, 3), rank, 1)
    shape = function(x).shape
    weights = random(shape, rank, 2)
    y, gradient, second = pull_back(x, weights)
    left = everywhere(tf.reduce_sum(y * weights))
    assert left == pytest.approx(everywhere(tf.reduce_sum(x * gradient)), rel=1e-12)
    # The derivative of <C'w, s> by w is C s.
    np.testing.assert_allclose(second, function(tf.sin(x)), rtol=1e-13, atol=1e-13)


def test_numbers_of_numpy(grid):
    shape = np.array([8, 9])
    for width in (np.int64(2), np.array([2, 2]), [(np.int32(2), 2), np.int8(2)]):
        plan = HaloPlan(grid, shape, width)
        assert plan._params == HaloPlan(grid, (8, 9), 2)._params
    halo_exchange(tf.zeros(plan.block), plan, axis=np.int64(0))


def test_constants_have_no_gradient(grid):
    plan = HaloPlan(grid, [[2] * n for n in grid.dims], 1, "constant", constant=7.0)
    x = tf.ones([2, 2], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = halo_exchange(x, plan)
    gradient = tape.gradient(y, x)
    assert everywhere(tf.reduce_sum(gradient)) == everywhere(
        tf.reduce_sum(tf.cast(tf.equal(y, 1.0), tf.float64))
    )
    assert float(tf.reduce_max(y)) == 7.0


def test_one_message_a_neighbour(grid):
    """Three fields, one node, and its peers are the neighbours in the grid."""
    plan = HaloPlan(grid, [[4] * n for n in grid.dims], 2)
    fields = [tf.zeros([4, 4], tf.float64)] * 3
    [node] = diff.describe(lambda *x: halo_exchange(list(x), plan), *fields)
    neighbours = {grid.neighbour(d, s) for d in range(2) for s in (-1, 1)} - {None}
    assert set(node.peers) == neighbours
    assert node.operation == "halo" and node.adjoint == "halo_adjoint"


def test_bad_input_is_named(grid, size):
    with pytest.raises(gradred.errors.InvalidArgument, match="expected 5 or more, got 4"):
        HaloPlan(grid, [[9] * grid.dims[0], [4] * grid.dims[1]], 5, "symmetric")
    plan = HaloPlan(grid, (2 * grid.dims[0], 3 * grid.dims[1]))
    with pytest.raises(gradred.errors.InvalidArgument, match="expected a block of shape"):
        halo_exchange(tf.zeros([5, 3]), plan)
    for arguments, pattern in (
        (((4, 4), 1, "wrap"), "expected one of periodic"),
        (((4, 4), 1.5), "width: expected a whole number, got 1.5"),
        (((4, 4), [(1, 2, 3), 1]), "expected one for below and one for above"),
    ):
        with pytest.raises(gradred.errors.InvalidArgument, match=pattern):
            HaloPlan(grid, *arguments)
    if size > 1:  # other plans on other ranks
        fresh = Context(dims=grid.dims, name="fresh")  # whose first operations are compared
        other = HaloPlan(fresh, [[3] * n for n in grid.dims], 1 + grid.rank % 2)
        with pytest.raises(gradred.errors.Mismatch, match="halo exchange of float64"):
            halo_exchange(tf.zeros([3, 3], tf.float64), other)
        gradred.barrier()  # who closes first would fail the others' last operation
        fresh.close()
