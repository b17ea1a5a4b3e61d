"""Groups of ranks, grids of ranks, and what a function communicates."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

import tensorflow as tf
from gradred import InvalidArgument, Mismatch, NotInitialized, diff
from gradred.diff import Context

pytestmark = pytest.mark.ranks(4)


def test_groups(context, rank):
    pairs = Context([[0, 1], [2, 3]])
    assert pairs.ranks == ((0, 1) if rank < 2 else (2, 3))
    assert pairs.rank == rank % 2
    assert diff.allreduce(tf.constant(rank), pairs) == (1 if rank < 2 else 5)
    some = Context([1, 3], name="odd")
    assert some.included == (rank in (1, 3))
    if some.included:
        assert diff.allgather(tf.constant([rank]), some).numpy().tolist() == [1, 3]
    else:
        for call in (lambda: some.rank, lambda: diff.barrier(some), lambda: some.end(1.0)):
            with pytest.raises(InvalidArgument, match=f"'odd': rank {rank} is no member"):
                call()
    # Operations of contexts that overlap, in one function and in its gradient.
    x = tf.constant([1.0 + rank])

    @tf.function
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = pairs.end(diff.allreduce(diff.allreduce(x, pairs) ** 2, context))
        return y, tape.gradient(y, x)

    y, gradient = both(x)
    assert y.numpy() == 2 * 3.0**2 + 2 * 7.0**2
    assert gradient.numpy() == 4 * 2 * 2 * (3.0 if rank < 2 else 7.0)
    pairs.close()


def test_grid(rank):
    grid = Context(dims=[2, 2], periodic=[False, True], name="grid")
    i, j = divmod(rank, 2)
    assert grid.coordinates == (i, j)
    assert grid.rank_at((i, j)) == rank
    assert grid.neighbour(0) == (rank + 2 if i == 0 else None)
    assert grid.neighbour(1) == grid.neighbour(1, -1) == 2 * i + (1 - j)
    x = tf.constant([1.0 + rank])
    down, right = diff.shift(x, grid), diff.shift(x, grid, -1, dim=1)
    assert down.numpy() == (x.numpy() - 2 if i else 0)
    assert right.numpy() == 1.0 + grid.neighbour(1)
    column = grid.sub([True, False])
    assert column.ranks == (j, j + 2) and column.dims == (2,) and column.periodic == (False,)
    assert diff.allreduce(x, column).numpy() == 2 * j + 4
    everybody_alone = grid.sub([False, False])
    assert everybody_alone.size == 1
    # Who is in no grid takes part, and so do several grids at once.
    pairs = Context([[0, 2], [1, 3]], dims=np.array([1, 2]), periodic=np.bool_(True)).sub([0, 1])
    assert pairs.ranks == ((0, 2) if rank % 2 == 0 else (1, 3)) and pairs.periodic == (True,)
    trio = Context([0, 1, 2], dims=[3, 1]).sub([True, False], name="trio")
    assert trio.ranks == ((0, 1, 2) if rank < 3 else ())
    assert [Context([[0], [1, 2, 3]]).sub([kept]).size for kept in (True, False)] == [
        1 if rank == 0 else 3,
        1,
    ]
    with pytest.raises(InvalidArgument, match="expected one value for each of the 2 dimensions"):
        grid.sub([True])


def test_what_makes_no_context(job, rank):
    for bad in ([2, 1], [[0], [0, 1]], [0, 4], [[]]):
        with pytest.raises(InvalidArgument, match="expected ascending ranks"):
            Context(bad)
    with pytest.raises(InvalidArgument, match=r"a grid of .* has 6 cells"):
        Context(dims=[2, 3])
    with pytest.raises(InvalidArgument, match="expected one value, or one for each"):
        Context(dims=[2, 2], periodic=[True])
    # On one rank.
    for bad in ({"ranks": [7]}, {"dims": [9]}, {"dims": ["many"]}, {"periodic": 3}):
        with pytest.raises(InvalidArgument, match="rank 2: ") as raised:
            Context(**(bad if rank == 2 else {}))
        assert set(job.exchange(str(raised.value))) == {str(raised.value)}
    with pytest.raises(Mismatch, match=r"rank 0: .*'here'.* rank 1: .*'there'"):
        Context(name="there" if rank == 1 else "here")
    closed = Context()
    closed.close()
    with pytest.raises(NotInitialized, match="it was closed"):
        diff.barrier(closed)


def test_the_example_of_the_documents(rank, size):
    page = Path(__file__).parents[2] / "docs" / "diff.md"
    lines = page.read_text().partition("    import gradred")
    code = textwrap.dedent((lines[1] + lines[2]).partition("\nEverything works")[0])
    names = {}
    exec(code, names)
    everyone = np.array(diff.allgather(names["x"][tf.newaxis], names["context"]))
    left = np.concatenate([np.zeros_like(everyone[:1]), everyone[:-1]])
    difference = 2 * (everyone - left)
    expected = difference[rank] - (difference[rank + 1] if rank < size - 1 else 0)
    np.testing.assert_allclose(names["gradient"], expected, rtol=1e-12)
    np.testing.assert_allclose(names["value"], ((everyone - left) ** 2).sum(), rtol=1e-12)


def test_describe(context, rank):
    @tf.function
    def function(x):
        a = diff.allreduce(x, context)
        b = context.while_loop(
            lambda i, _: i < 2,
            lambda i, u: (i + 1, diff.shift(u, context)),
            (tf.constant(0), a),
        )[1]
        return context.end(tf.reduce_sum(diff.gather(b, context, 1)))

    x = tf.zeros([5, 2], tf.float32)
    nodes = diff.describe(function, x)
    assert [node.operation for node in nodes] == ["allreduce", "sendrecv", "gather"]
    assert [node.adjoint for node in nodes] == ["allreduce", "sendrecv", "scatter"]
    everybody = tuple(r for r in range(4) if r != rank)
    neighbours = tuple(r for r in (rank - 1, rank + 1) if 0 <= r < 4)
    assert [node.peers for node in nodes] == [
        everybody,
        neighbours,
        everybody if rank == 1 else (1,),
    ]
    assert [node.nbytes for node in nodes] == [40, 40, 40]
    assert [node.adjoint_nbytes for node in nodes] == [40, 40, None if rank == 1 else 0]
    assert "while" in nodes[1].where and "allreduce of 40 bytes in 'all'" in str(nodes[0])

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    operations = [node.operation for node in diff.describe(gradient, x)]
    assert operations.count("scatter") == 1 and operations.count("allreduce") == 2
    np.testing.assert_array_equal(gradient(x).shape, [5, 2])
