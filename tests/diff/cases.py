"""Operations as functions of one float64 tensor of shape [6, 3], for the tests of all of them.

A new operation gets a line in ``linear``, which tries it in all modes.
"""

from __future__ import annotations

import numpy as np

import gradred
import tensorflow as tf
from gradred import diff
from gradred.diff import Context


def random(shape, rank, salt, dtype=np.float64):
    values = np.random.default_rng([salt, rank]).normal(size=shape)
    return tf.constant(values.astype(dtype))


def everywhere(value):
    """The sum over ranks of a number."""
    return float(gradred.allreduce(np.float64(value), op=gradred.Sum, name="everywhere"))


def unequal_parts(rank, size, total=6):
    """Numbers with this sum, one for each rank, another list on each rank."""
    others = [rank % 2, 1, 2][: size - 1]
    return [total - sum(others), *others]


def my_part(rank, size, total=6):
    """Numbers with this sum over ranks: this rank's."""
    return unequal_parts(0, size, total)[rank]


def linear(context: Context):
    """Name -> linear function."""
    rank, size = context.rank, context.size
    last = size - 1
    parts = unequal_parts(rank, size)
    rows = my_part(rank, size)

    def message(x):
        if size == 1:
            return x
        context.begin(x)
        y = tf.zeros_like(x)
        if rank == 0:
            diff.send(x, context, last)
        elif rank == last:
            y = diff.recv(y, context, 0)
        return context.end(y)

    def ring(x):
        return diff.sendrecv(x, context, (rank + 1) % size, (rank - 1) % size)

    def unequal_ring(x):
        before = (rank - 1) % size
        return diff.sendrecv(
            x[: rank + 1], context, (rank + 1) % size, before, tf.zeros([before + 1, 3], x.dtype)
        )

    def moved(x):
        before = diff.grid_blocks([6 * size, 3], [size, 1])
        after = diff.grid_blocks([6 * size, 3], [1, size])
        return diff.repartition(x, context, before, after)

    def loop(x):
        def body(i, u):
            a = diff.shift(u, context)
            b = diff.allreduce(u, context, "mean")
            return i + 1, 0.5 * u + 0.3 * a + 0.2 * b

        return context.while_loop(lambda i, _: i < 3, body, (tf.constant(0), x))[1]

    def branch(x):
        return context.cond(
            tf.reduce_sum(tf.ones([3])) > 2.0,
            lambda: diff.scan(x, context),
            lambda: diff.allreduce(x, context),
        )

    return {
        "sum": lambda x: diff.allreduce(x, context),
        "mean": lambda x: diff.allreduce(x, context, "mean"),
        "broadcast": lambda x: diff.broadcast(x, context, last),
        "reduce": lambda x: diff.reduce(x, context, last),
        "allgather": lambda x: diff.allgather(x, context),
        "allgather of unequal parts": lambda x: diff.allgather(x[: rank + 1], context),
        "reduce_scatter": lambda x: diff.reduce_scatter(x, context, rows),
        "gather": lambda x: diff.gather(x[: rank + 1], context, last),
        "scatter": lambda x: diff.scatter(x, context, last, rows),
        "alltoall": lambda x: diff.alltoall(x, context, parts)[0],
        "scan": lambda x: diff.scan(x, context),
        "scan from the last rank": lambda x: diff.scan(x, context, reverse=True),
        "send and recv": message,
        "sendrecv": ring,
        "sendrecv of unequal parts": unequal_ring,
        "shift to an end": lambda x: diff.shift(x, context),
        "repartition": moved,
        "loop": loop,
        "branch": branch,
        "several": lambda x: (
            diff.scan(diff.allgather(x, context)[:5], context) + diff.broadcast(x, context)[1:]
        ),
    }


def nonlinear(context: Context):
    """Name -> other differentiable function."""
    return {
        "max": lambda x: diff.allreduce(x, context, "max"),
        "min": lambda x: diff.allreduce(x, context, "min"),
        "product": lambda x: diff.allreduce(x, context, "product"),
    }


NAMES = (
    "sum",
    "mean",
    "broadcast",
    "reduce",
    "allgather",
    "allgather of unequal parts",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "scan",
    "scan from the last rank",
    "send and recv",
    "sendrecv",
    "sendrecv of unequal parts",
    "shift to an end",
    "repartition",
    "loop",
    "branch",
    "several",
)
