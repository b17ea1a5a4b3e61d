"""What goes wrong says so, alike on all ranks, and nothing hangs."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tensorflow as tf
from gradred import Error, InvalidArgument, diff
from gradred.diff import Context
from gradred.tensorflow.native import as_gradred_error

pytestmark = pytest.mark.ranks(2, 3)


def text_of(call):
    """The text of the error of gradred's that a call raises, in eager mode or in a graph."""
    try:
        call()
    except tf.errors.OpError as error:
        return str(as_gradred_error(error))
    except (Error, TypeError, ValueError) as error:
        return str(error)
    raise AssertionError("no error")


@pytest.mark.smoke
@pytest.mark.parametrize("in_graph", [False, True])
def test_ranks_that_differ(in_graph, context, job, rank, size):
    other = size - 1

    def both(x, operation):
        return tf.function(operation)(x) if in_graph else operation(x)

    shapes = tf.zeros([3 if rank == other else 2, 4])
    dtypes = tf.zeros([2], tf.float64 if rank == other else tf.float32)
    operations = (
        (lambda x: diff.scan(x, context)) if rank == other else (lambda x: diff.psum(x, context))
    )
    kinds = (
        (lambda x: diff.allgather(x, context))
        if rank == other
        else (lambda x: diff.psum(x, context))
    )
    rows = tf.zeros([2, 3 if rank == other else 2])
    cases = [
        (shapes, lambda x: diff.allreduce(x, context), r"float32 \[2, 4\]; .*float32 \[3, 4\]"),
        (dtypes, lambda x: diff.scan(x, context), r"scan of float32 \[2\]; .*of float64 \[2\]"),
        (dtypes, lambda x: diff.broadcast(x, context), "broadcast from root 0 of float32"),
        (shapes, operations, r"allreduce\(sum\) of .*: scan of"),
        (shapes, kinds, r"allreduce\(sum\) of .*: allgather of"),
        (rows, lambda x: diff.allgather(x, context), r"rows of float32 \[2\]; .*float32 \[3\]"),
        (
            tf.zeros([4, 2]),
            lambda x: diff.reduce_scatter(x, context, rows=4),
            r"expected 4 rows over all ranks, got \[4, 4",
        ),
        (
            tf.zeros([4, 2]),
            lambda x: diff.alltoall(x, context, [5] * size if rank == other else [4] + [0] * other),
            rf"rank {other}: alltoall: expected as splits {size} numbers from 0 with the sum 4",
        ),
        (
            tf.constant([float(rank)]),
            lambda x: diff.check_replicated(x, context),
            "expected equal values on all ranks",
        ),
    ]
    for x, operation, pattern in cases:
        text = text_of(lambda x=x, operation=operation: both(x, operation))
        assert re.search(pattern, text) and "context 'all'" in text, text
        assert set(job.exchange(text)) == {text}
        assert both(tf.ones([2]), lambda y: diff.allreduce(y, context))[0] == size


@pytest.mark.usefixtures("context")
def test_messages_that_differ(job, rank, size):
    """Only the receiver can see it: the context ends, with its text on all ranks."""
    context = Context(name="messages")

    def exchange():
        x = tf.zeros([3 if rank == 0 else 2])
        diff.sendrecv(x, context, (rank + 1) % size, (rank - 1) % size)
        diff.barrier(context)

    texts = job.exchange(text_of(exchange))
    pattern = r"context 'messages': a message from rank \d: expected float32 \[\d\], got \d elem"
    assert all(re.search(pattern, text) for text in texts)
    assert set(job.exchange(text_of(lambda: diff.barrier(context)))) <= set(texts)
    again = Context(name="messages")
    diff.barrier(again)


@pytest.mark.usefixtures("context")
def test_a_rank_that_leaves(job, rank, size):
    context = Context(name="left")
    diff.barrier(context)
    if rank == size - 1:
        context.close()
    else:
        text = text_of(lambda: diff.allreduce(tf.ones([2]), context))
        assert text == f"rank {size - 1} has left context 'left': close() was called"


def test_wrong_arguments(context, size):
    x = tf.ones([5, 2])
    for call, pattern in (
        (lambda: diff.allreduce(x, context, "avg"), "op='avg': expected one of sum, min"),
        (lambda: diff.broadcast(x, context, size), f"expected a rank from 0 to {size - 1}"),
        (lambda: diff.allgather(tf.ones([]), context), "allgather: a scalar"),
        (lambda: diff.sendrecv(x, context, 0, None, tf.ones([1], tf.float64)), "like is float64"),
        (lambda: diff.grid_blocks([3], [1, 1]), "by a grid of"),
        (lambda: diff.reduce_scatter(tf.ones([size + 1, 2]), context), "expected a multiple"),
        (lambda: diff.allreduce(tf.constant(["a"]), context), "dtype string"),
        (
            lambda: diff.repartition(x, context, [[(0, 2)]] * size, [[(0, 2)]] * size),
            "blocks before overlap or leave gaps",
        ),
    ):
        with pytest.raises(InvalidArgument, match=pattern):
            call()
    with pytest.raises(InvalidArgument, match=r"allreduce\(mean\) of int32"):
        diff.allreduce(tf.constant([1]), context, "mean")


def test_wrong_arguments_on_one_rank(context, job, rank, size):
    """Refused there before anything runs, eager or traced; the others do not wait for it."""
    other = size - 1
    x, plan = tf.ones([4, 2]), diff.HaloPlan(Context(dims=[size], name="line"), [[2] * size])
    square = [np.arange(4), np.arange(4), (4, 4)]
    pattern = diff.sparse.Pattern(*square, context)
    values = tf.ones([pattern.nonzeros])
    calls = {
        "scalar": lambda: diff.allgather(tf.ones([]), context),
        "op": lambda: diff.allreduce(x, context, "avg"),
        "root": lambda: diff.broadcast(x, context, size),
        "roots": lambda: diff.reduce(x, context, 1.5),
        "rows": lambda: diff.reduce_scatter(tf.ones([size + 1, 2]), context),
        "gathered": lambda: diff.gather(tf.ones([]), context),
        "scattered": lambda: diff.scatter(x, context, -1, 1),
        "splits": lambda: diff.alltoall(tf.ones([size + 1, 2]), context),
        "words": lambda: diff.scan(tf.constant(["a"]), context),
        "objects": lambda: diff.psum(object(), context),
        "equal": lambda: diff.check_replicated("a", context),
        "peers": lambda: diff.sendrecv(x, context, size, None),
        "places": lambda: diff.shift(x, context, dim=3),
        "blocks": lambda: diff.repartition(x, context, [], []),
        "widths": lambda: diff.HaloPlan(context, [[2] * size], 3),
        "triplets": lambda: diff.sparse.assemble(pattern, tf.ones([9])),
        "vectors": lambda: diff.sparse.product(pattern, values, tf.ones([9])),
        "methods": lambda: diff.sparse.solve(pattern, values, values, method="lu"),
        "counts": lambda: diff.sparse.Pattern(*square, context, row_counts=[1] * (size + 5)),
    }
    for name, call in calls.items():
        call = tf.function(call) if name in ("rows", "root", "words") else call
        text = text_of(call if rank == other else (lambda: diff.barrier(context)))
        texts = job.exchange(text)
        _, found, why = texts[0].partition(f"'all': rank {other}: ")
        assert found and why in texts[other] and texts.count(texts[0]) >= other, (name, texts)
        assert diff.allreduce(tf.ones([2]), context)[0] == size
    # A plan's own context, and what is only described.
    text = text_of(
        (lambda: diff.halo_exchange(tf.ones([3]), plan))
        if rank == other
        else (lambda: diff.halo_exchange(tf.ones([2]), plan))
    )
    assert "'line': expected a block of shape" in text, text
    if rank == other:
        assert "avg" in text_of(lambda: diff.describe(calls["op"]))
    assert diff.allreduce(tf.ones([2]), context)[0] == size
    job.barrier()
    plan.context.close()


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("to_itself", [False, True])
def test_messages_that_are_refused(to_itself, job, rank, size):
    """Only the peer could match one: the context ends, and says why."""
    context, last = Context(name="refused"), size - 1
    source = last if to_itself or rank != last else size
    pattern = "would wait for itself" if to_itself else "expected a rank from 0 to"
    text = text_of(lambda: diff.recv(tf.ones([1]), context, source))
    assert re.search(pattern, text), text
    texts = job.exchange(text_of(lambda: diff.barrier(context)))
    assert set(texts) == {f"rank {last}: {job.exchange(text)[last]}"}
    context.close()


@pytest.mark.parametrize("given", [True, False])
def test_a_loop_that_guards_its_steps(given, context, job, rank, size):
    """One rank fails between messages that the others wait for: all catch it and go on."""
    contexts = [Context(name="steps", dims=[size], periodic=True), Context(name="besides")]
    plan = diff.HaloPlan(contexts[0], [[3] * size])
    caught = ""
    for step in range(4):
        try:
            with diff.guard(*contexts[: int(given)], what=f"step {step}"):
                x = diff.sendrecv(tf.ones([3]), contexts[0], (rank + 1) % size, (rank - 1) % size)
                if step == 2 and rank == size - 1:
                    raise RuntimeError("out of data")
                diff.recv(x, contexts[0], (rank - 1) % size) if rank == 0 else None
                diff.send(x, contexts[0], 0) if rank == size - 1 else None
                diff.halo_exchange(x, plan)
        except (Error, RuntimeError) as error:
            caught = f"{step}: {error}"
            break
    wanted = f"2: rank {size - 1}: step 2 in context 'steps': RuntimeError: out of data"
    assert job.exchange(caught) == [wanted] * (size - 1) + ["2: out of data"]
    if given:
        assert diff.allreduce(tf.ones([]), contexts[1]) == size
    else:
        text = text_of(lambda: diff.barrier(contexts[1]))  # who told it first is not fixed
        assert ": step 2 in context '" in text and text.endswith("RuntimeError: out of data"), text
    for made in contexts:
        made.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_guard_tells_those_outside_of_a_failed_context(in_graph, job, rank):
    """A pair differs, which its two ranks know; the third one waits elsewhere."""
    everybody = Context(name="everybody")
    pair, within = Context([[0, 1]], name="pair"), Context([[0, 1]], name="within")

    def step(x):
        return diff.allreduce(diff.allreduce(x, pair) if rank < 2 else x, everybody)

    def guarded():
        with diff.guard(everybody, pair, within, what="step"):
            (tf.function(step) if in_graph else step)(tf.zeros([2 + rank]))

    texts = job.exchange(text_of(guarded))
    wanted = r"operation 0 of context 'pair': the ranks differ: rank 0: .*; rank 1: .*"
    assert texts[0] == texts[1] and re.fullmatch(wanted, texts[0]), texts
    assert re.fullmatch(rf"rank [01]: \w+: .*{wanted}", texts[2], re.DOTALL), texts
    if rank < 2:  # agreed on by all members
        assert diff.allreduce(tf.ones([]), pair) == 2
        assert diff.allreduce(tf.ones([]), within) == 2
    for made in (everybody, pair, within):
        made.close()


@pytest.mark.parametrize("explicit", [False, True])
def test_what_a_guard_takes_for_known(explicit, job, rank, size):
    """An error raised from one that all have is that one; raised while it is handled, a new one."""
    steps = Context(name="steps")

    def differ():
        try:
            diff.allreduce(tf.zeros([2 + rank]), steps)
        except Error as error:
            if rank == 0 and explicit:
                raise ValueError("not alike") from error
            if rank == 0:
                raise ValueError("cannot write the log")  # noqa: B904
            raise

    with pytest.raises((Error, ValueError)), diff.guard(steps, what="step"):
        differ()
    if explicit:
        assert diff.allreduce(tf.ones([]), steps) == size
    else:
        text = text_of(lambda: diff.barrier(steps))
        assert text == "rank 0: step in context 'steps': ValueError: cannot write the log"
    steps.close()


def test_loops_and_branches_of_tensorflow(context):
    """They would begin chains of their own."""

    @tf.function
    def loop(x):
        return tf.while_loop(lambda x: x < 1, lambda x: diff.allreduce(x, context), [x])

    @tf.function
    def branch(x):
        return tf.cond(x < 1, lambda: diff.allreduce(x, context), lambda: x)

    for function in (loop, branch):
        # AutoGraph makes an exception of its own of what is raised while it traces.
        with pytest.raises(Exception, match="use the context's while_loop or cond"):
            function(tf.zeros([]))
    with pytest.raises(Exception, match="jit_compile"):
        tf.function(lambda x: diff.allreduce(x, context), jit_compile=True)(tf.zeros([2]))


KILLED = """
import os, signal, sys
import numpy as np
import tensorflow as tf
import gradred
from gradred import diff
from gradred.diff import Context

gradred.init()
context = Context(name="all")

# Without comparisons the transport or the ranks that have come say what is wrong.
assert diff.allreduce(tf.ones([2]), context)[0] == 3
messages = Context(name="messages")
try:
    destination = 1 if messages.rank == 0 else None
    source = 0 if messages.rank == 1 else None
    diff.sendrecv(tf.zeros([2 + messages.rank]), messages, destination, source)
    diff.barrier(messages)
except gradred.Error as error:
    assert "context 'messages'" in str(error), error
else:
    raise AssertionError

@tf.function
def step(x):
    for _ in range(3):
        x = diff.allreduce(x, context, "mean")
    return x

for i in range(1000):
    if i == 20 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(tf.ones([1000]))
    except tf.errors.OpError as error:
        assert "PeerLost" in error.message and "rank 1" in error.message, error
        print("lost at", i)
        sys.exit(3)
"""


@pytest.mark.ranks(1)
def test_a_killed_rank(run_ranks):
    job = run_ranks(
        3,
        KILLED,
        launcher="local",
        options=["--grace", "20"],
        env={"GRADRED_DIFF_CHECKS": "0"},
    )
    assert job.codes[1] == -9, job.text
    for rank in (0, 2):
        assert job.codes[rank] == 3 and "lost at" in job.out[rank], job.text


WAITING = """
import tensorflow as tf
import gradred
from gradred import diff
from gradred.diff import Context

gradred.init()
context = Context(name="all")
try:
    diff.recv(tf.zeros([3]), context, 1 - context.rank)
except gradred.Timeout as error:
    print(error)
"""


@pytest.mark.ranks(1)
def test_ranks_that_wait_for_each_other(run_ranks):
    """In shared memory, where what they tell each other meanwhile must not count as movement."""
    limit = {"GRADRED_TRANSPORT_TIMEOUT_SECONDS": "1"}
    job = run_ranks(2, WAITING, launcher="local", env=limit)
    for rank in (0, 1):
        text = "context 'all': all ranks wait, and nothing moves any more: ranks 0, 1: recv"
        assert text in job.out[rank], job.text
