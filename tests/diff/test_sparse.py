"""Sparse matrices as nodes, against scipy.sparse: values, adjoints, second derivatives, errors."""

from __future__ import annotations

import gc
import os
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import gradred
import tensorflow as tf
from diff.cases import everywhere, random
from gradred import diff
from gradred.diff import sparse

pytestmark = [pytest.mark.ranks(1, 2, 3, 4)]

N = 24


def triplets(drift=0.3):
    """Of a diffusion and drift on a ring with a sink, all of them: rows, columns, values."""
    i = np.arange(N)
    rows = np.concatenate([i, i, i, [3, 3, 20]])
    columns = np.concatenate([i, (i + 1) % N, (i - 1) % N, [20, 20, 3]])
    rates = 1.0 + 0.1 * np.cos(i)
    before = np.roll(rates, 1)
    values = np.concatenate(
        [rates + before + 0.5, -rates - drift, -before + drift, [-0.02 * drift] * 3]
    )
    return rows, columns, values


def scipy_matrix(drift=0.3):
    rows, columns, values = triplets(drift)
    return scipy.sparse.csr_matrix((values, (rows, columns)), shape=(N, N))


@pytest.fixture(scope="module")
def system(context, rank, size):
    """A pattern whose triplets come from any rank, and this rank's positions among them."""
    rows, columns, _ = triplets()
    mine = np.random.default_rng(5).permutation(len(rows))[rank::size]
    counts = [N - 5 * (size - 1), *[5] * (size - 1)]
    return sparse.Pattern(rows[mine], columns[mine], (N, N), context, row_counts=counts), mine


def own(vector, pattern):
    return tf.constant(np.asarray(vector)[pattern.first_row : pattern.first_row + pattern.rows])


def gathered(x, context):
    return diff.allgather(x, context).numpy()


def test_assembly_and_products(system, context):
    pattern, mine = system
    a, x = scipy_matrix(), np.random.default_rng(1).normal(size=N)
    values = sparse.assemble(pattern, triplets()[2][mine])
    local = scipy.sparse.csr_matrix(
        (values.numpy(), pattern.indices, pattern.indptr), shape=(pattern.rows, N)
    )
    wanted = a[pattern.first_row : pattern.first_row + pattern.rows]
    assert abs(local - wanted).max() < 1e-15
    y = sparse.product(pattern, values, own(x, pattern))
    np.testing.assert_allclose(gathered(y, context), a @ x, rtol=1e-13, atol=1e-13)
    y = sparse.product(pattern, values, own(x, pattern), transposed=True)
    np.testing.assert_allclose(gathered(y, context), a.T @ x, rtol=1e-13, atol=1e-13)


def test_rectangular(context, rank):
    shape = (7, 11)
    dense = np.where(np.random.default_rng(2).random(shape) < 0.4, 1.0, 0.0) * np.arange(1, 12)
    rows, columns = np.nonzero(dense)
    mine = slice(rank, None, context.size)
    pattern = sparse.Pattern(rows[mine], columns[mine], shape, context)
    values = sparse.assemble(pattern, dense[rows, columns][mine])
    x = tf.ones([pattern.columns], tf.float64)
    np.testing.assert_array_equal(
        gathered(sparse.product(pattern, values, x), context), dense.sum(1)
    )
    with pytest.raises(gradred.errors.InvalidArgument, match="expected a square matrix"):
        sparse.solve(pattern, values, x)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("assemble", "tape inside"),
        ("product", "eager"),
        ("transposed", "tape inside"),
        ("cg", "tape inside"),
        ("bicgstab", "eager"),
        ("bicgstab", "tape inside"),
        ("bicgstab", "tape outside"),
        ("gmres", "tape inside"),
    ],
)
def test_gradients(name, mode, system, context, rank):
    """First derivatives by differences and exact ones, the second by differences of the first."""
    pattern, mine = system
    drift = 0.0 if name == "cg" else 0.3
    t, x = tf.constant(triplets(drift)[2][mine]), random((pattern.rows,), rank, 3)

    def function(t, x):
        values = sparse.assemble(pattern, t)
        if name == "assemble":
            return values
        if name in ("product", "transposed"):
            return sparse.product(pattern, values, x, transposed=name == "transposed")
        return sparse.solve(pattern, values, x, method=name, rtol=1e-13)

    if mode == "tape outside":
        function = tf.function(function)

    def loss_of(t, x):
        y = function(t, x)
        weights = tf.cos(tf.cast(tf.range(tf.size(y)), y.dtype) + rank)
        return tf.reduce_sum(weights * y**3)

    def derivatives(t, x, dt, dx):
        with tf.GradientTape() as outer:
            outer.watch([t, x])
            context.begin(t, x)
            with tf.GradientTape() as inner:
                inner.watch([t, x])
                context.begin(t, x)
                loss = context.end(loss_of(t, x))
            zero = tf.UnconnectedGradients.ZERO
            gt, gx = inner.gradient(loss, [t, x], unconnected_gradients=zero)
            along = context.end(tf.reduce_sum(gt * dt) + tf.reduce_sum(gx * dx))
        return loss, along, outer.gradient(along, [t, x], unconnected_gradients=zero)

    if mode == "tape inside":
        derivatives = tf.function(derivatives)
    # In directions that keep a symmetric matrix symmetric.
    rows, columns, _ = (a[mine] for a in triplets())
    weights = np.where((rows == 3) & (columns == 20), 0.05, 0.1)  # that entry has two triplets
    dt = tf.constant(np.cos(rows + columns) * weights)
    dx = random((pattern.rows,), rank, 7)
    step = 1e-5
    _, along, (ht, hx) = derivatives(t, x, dt, dx)
    first = everywhere(along)
    second = everywhere(tf.reduce_sum(ht * dt) + tf.reduce_sum(hx * dx))
    ahead, behind = (derivatives(t + s * step * dt, x + s * step * dx, dt, dx) for s in (1, -1))
    assert (everywhere(ahead[0]) - everywhere(behind[0])) / (2 * step) == pytest.approx(
        first, rel=1e-6
    )
    assert (everywhere(ahead[1]) - everywhere(behind[1])) / (2 * step) == pytest.approx(
        second, rel=1e-6
    )


@pytest.mark.parametrize("method", ["cg", "bicgstab", "gmres"])
def test_solution_and_gradients_are_scipys(method, system, context):
    """On any number of ranks the same, to 1e-12 of the largest."""
    pattern, mine = system
    drift = 0.0 if method == "cg" else 0.3
    a = scipy_matrix(drift).tocsc()
    b = np.random.default_rng(4).normal(size=N)
    u = scipy.sparse.linalg.spsolve(a, b)
    adjoint = scipy.sparse.linalg.spsolve(a.T.tocsc(), 2 * u)
    t, right = tf.constant(triplets(drift)[2][mine]), own(b, pattern)
    for preconditioner in ("jacobi", None):
        with tf.GradientTape() as tape:
            tape.watch([t, right])
            values = sparse.assemble(pattern, t)
            x, residuals = sparse.solve(
                pattern,
                values,
                right,
                method=method,
                preconditioner=preconditioner,
                rtol=1e-14,
                with_residuals=True,
            )
            loss = context.end(tf.reduce_sum(x**2))
        gt, gb = tape.gradient(loss, [t, right])
        np.testing.assert_allclose(gathered(x, context), u, rtol=0, atol=1e-12 * abs(u).max())
        np.testing.assert_allclose(
            gathered(gb, context), adjoint, rtol=0, atol=1e-12 * abs(adjoint).max()
        )
        rows, columns, _ = (part[mine] for part in triplets())
        wanted = -adjoint[rows] * u[columns]
        np.testing.assert_allclose(gt, wanted, rtol=0, atol=1e-12 * abs(u).max() ** 2 * 4)
        assert residuals[0] == 1 and residuals[-1] <= 1e-14


def test_float32(system, context):
    pattern, mine = system
    a, b = scipy_matrix(0.0), np.ones(N)
    values = sparse.assemble(pattern, triplets(0.0)[2][mine].astype(np.float32))
    x = sparse.solve(pattern, values, tf.cast(own(b, pattern), tf.float32))
    assert x.dtype == tf.float32
    np.testing.assert_allclose(
        gathered(x, context), scipy.sparse.linalg.spsolve(a.tocsc(), b), rtol=1e-5
    )


def test_boomeramg_that_is_not_there(system, context, job):
    """One text on all ranks, and the context goes on. See test_hypre.py for where it is."""
    pattern, mine = system
    values = sparse.assemble(pattern, triplets()[2][mine])
    b = own(np.ones(N), pattern)
    text = "solved"
    try:
        sparse.solve(pattern, values, b, method="gmres", preconditioner="boomeramg")
    except gradred.errors.InvalidArgument as error:
        text = str(error)
        assert re.search("boomeramg: expected a job on MPI|HYPRE|another MPI", text)
    assert set(job.exchange(text)) == {text}
    sparse.solve(pattern, values, b, method="gmres")


def test_tiny_and_large_right_hand_sides(system, context):
    """Whose squares vanish or overflow."""
    pattern, mine = system
    values = sparse.assemble(pattern, triplets(0.0)[2][mine])
    x = sparse.solve(pattern, values, own(np.ones(N), pattern))
    for size in (2.0**-900, 2.0**900):
        scaled = sparse.solve(pattern, values, own(np.full(N, size), pattern))
        np.testing.assert_array_equal(scaled / size, x)


def test_solutions_that_no_number_can_hold(system, context):
    pattern, mine = system
    values = sparse.assemble(pattern, triplets(0.0)[2][mine])
    for dtype, size in ((tf.float64, 1e200), (tf.float32, 1e30)):
        small, large = tf.cast(values / size, dtype), tf.cast(own(np.full(N, size), pattern), dtype)
        with pytest.raises(gradred.errors.InvalidArgument, match=f"that {dtype.name} cannot hold"):
            sparse.solve(pattern, small, large)


def resident_nbytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.ranks(2)
def test_what_was_set_up_is_freed_with_the_pattern(context, rank):
    n, sizes = 200_000, []
    at = np.arange(rank * n // 2, (rank + 1) * n // 2)
    for _ in range(14):
        pattern = sparse.Pattern(
            np.tile(at, 3), np.r_[at, (at + 1) % n, at - 1] % n, (n, n), context
        )
        # Some 10 MB with what the solver keeps.
        sparse.solve(pattern, tf.repeat([0.1], pattern.nonzeros), tf.ones([n // 2]), method="gmres")
        del pattern
        sizes.append(resident_nbytes())
    assert sizes[-1] - sizes[3] < 40e6, sizes


@pytest.mark.parametrize("kind", ["eager", "nested", "concrete"])
def test_a_pattern_that_goes_before_the_gradient(kind, context, rank, size):
    """It is kept for as long as it is needed."""
    rows, columns, values = triplets(0.0)
    mine = slice(rank, None, size)
    t, one = tf.constant(values[mine]), N // size + (rank < N % size)

    def solve(pattern, t):
        values = sparse.assemble(pattern, t)
        return sparse.solve(pattern, values, tf.ones([one], t.dtype), rtol=1e-13)

    def gradient(make):
        with tf.GradientTape() as tape:
            tape.watch(t)
            x = make()
            loss = context.end(tf.reduce_sum(x**2))
        return tape.gradient(loss, t).numpy()

    pattern = sparse.Pattern(rows[mine], columns[mine], (N, N), context)
    wanted = gradient(lambda: solve(pattern, t))
    if kind == "concrete":

        def loop(t):
            return context.while_loop(
                lambda i, _: i < 1,
                lambda i, x: (i + 1, x + solve(pattern, t)),
                (0, tf.zeros([one], t.dtype)),
            )[1]

        traced = tf.function(loop).get_concrete_function(t)
        kept = weakref.ref(pattern)
        del pattern
        gc.collect()
        got = gradient(lambda: traced(t))
        assert kept() is not None
    elif kind == "eager":
        got = gradient(lambda: solve(sparse.Pattern(rows[mine], columns[mine], (N, N), context), t))
    else:
        with tf.GradientTape() as outer:
            outer.watch(t)
            with tf.GradientTape() as inner:
                inner.watch(t)
                x = solve(sparse.Pattern(rows[mine], columns[mine], (N, N), context), t)
                loss = context.end(tf.reduce_sum(x**2))
            got = inner.gradient(loss, t)
            along = context.end(tf.reduce_sum(got))
        assert np.isfinite(outer.gradient(along, t)).all()
    np.testing.assert_array_equal(got, wanted)


def test_ranks_that_take_different_patterns(system, context, job, rank, size):
    pattern, mine = system
    rows, columns, values = triplets()
    counts = [pattern.rows if r == rank else 0 for r in range(size)]
    counts = [sum(c) for c in zip(*job.exchange(counts), strict=True)]
    other = sparse.Pattern(rows[mine], columns[mine], (N, N), context, row_counts=counts)
    mixed = other if rank == size - 1 else pattern

    def assemble():
        return sparse.assemble(mixed, values[mine])

    if size > 1:
        with pytest.raises(gradred.errors.Mismatch, match="on the pattern of operation"):
            assemble()
    np.testing.assert_array_equal(
        sparse.assemble(other, values[mine]), sparse.assemble(pattern, values[mine])
    )


def test_failures_are_errors_on_all_ranks(system, context, rank, size):
    pattern, mine = system
    values = sparse.assemble(pattern, triplets(0.0)[2][mine])
    b = tf.ones([pattern.rows], tf.float64) * (1.0 + rank)
    error = gradred.errors.InvalidArgument
    with pytest.raises(error, match=r"has not converged after 2 iterations.*; residuals: 1 "):
        sparse.solve(pattern, values, random((pattern.rows,), rank, 1), max_iterations=2)
    with pytest.raises(error, match="not symmetric positive definite"):
        sparse.solve(pattern, -values, b)
    with pytest.raises(error, match="diagonal entry that is not zero, got none in row 0"):
        sparse.solve(pattern, values * 0, b)
    with pytest.raises(error, match="expected float32 or float64 of shape"):
        sparse.product(pattern, values, tf.zeros([pattern.rows + 1], tf.float64))
    with pytest.raises(error, match="expected one of"):
        sparse.solve(pattern, values, b, method="minres")
    with pytest.raises(error, match=r"expected a row below 24 .* got \(24, 0\)"):
        sparse.Pattern([24 if rank == size - 1 else 0], [0], (N, N), context)
    with pytest.raises(error, match="24 in all"):
        sparse.Pattern([0], [0], (N, N), context, row_counts=[1] * size)
    # The context goes on.
    np.testing.assert_allclose(sparse.product(pattern, values, sparse.solve(pattern, values, b)), b)
