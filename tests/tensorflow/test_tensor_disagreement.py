"""Ranks whose tensors disagree: one error on all, eager and in graphs; and bad input on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradred.tensorflow as hvd
import tensorflow as tf
from gradred.errors import InvalidArgument, Mismatch, Unsupported
from gradred.tensorflow.native import as_gradred_error
from mpi.disagreements import CASES, Call, is_told_alike

pytestmark = pytest.mark.ranks(2)

BOTH = pytest.mark.parametrize("mode", ["eager", "graph"])


def run(call: Call, name: str, mode: str) -> Any:
    """One call of the table on tensors."""
    operation, tensors, options = call
    function: Callable[..., Any] = getattr(hvd, operation)
    inputs = [tf.ones(shape, dtype) for shape, dtype in tensors]
    options = {key: getattr(hvd, v) if key == "op" else v for key, v in options.items()}
    if "wire" in options:
        options["compression"] = options.pop("wire")
    if operation == "broadcast":
        options.setdefault("root_rank", 0)

    def step(*inputs: tf.Tensor) -> Any:
        if operation == "barrier":
            return function(name=name)
        first = list(inputs) if operation.startswith("grouped_") else inputs[0]
        return function(first, name=name, **options)

    return step(*inputs) if mode == "eager" else tf.function(step, autograph=False)(*inputs)


def mismatch(call: Callable[[], Any], mode: str) -> str:
    """The text of the Mismatch that it raises."""
    if mode == "eager":
        with pytest.raises(Mismatch) as ours:
            call()
        return str(ours.value)
    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        call()
    error = as_gradred_error(caught.value)
    assert isinstance(error, Mismatch)
    return str(error)


@BOTH
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("operation", sorted({case.right[0] for case in CASES}))
def test_table(job, mode: str, operation: str) -> None:
    for case in (c for c in CASES if c.right[0] == operation):
        name = f"table {mode} {case}"
        odd = case.number % job.size
        mine = case.odd if job.rank == odd else case.right
        text = mismatch(lambda: run(mine, name, mode), mode)  # noqa: B023
        texts = job.exchange(text)
        assert len(set(texts)) == 1, texts
        is_told_alike(text, case, name, odd, job.size)
        run(case.right, name, mode)


@BOTH
def test_slices_and_tensors(job, mode: str) -> None:
    """An allreduce of tf.IndexedSlices on one rank, of a tensor on the others."""

    def step(x: tf.Tensor) -> Any:
        thing = tf.IndexedSlices(x, tf.constant([0, 1]), tf.constant([4, 3])) if job.rank else x
        return hvd.allreduce(thing, name=f"slices {mode}")

    run = step if mode == "eager" else tf.function(step, autograph=False)
    text = mismatch(lambda: run(tf.ones([2, 3])), mode)
    assert len(set(job.exchange(text))) == 1
    assert "rank 0: allreduce" in text and "rank 1: allgather" in text


def test_eager_calls_meet_those_of_graphs(job) -> None:
    """By name: which mode a rank runs in is no difference."""
    for operation in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
        call: Call = (operation, [((12, 2), "float32")], {})
        run(call, f"mixed {operation}", "graph" if job.rank == 0 else "eager")


class Zip:
    """A compressor as Horovod's users write them."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None


def _bad() -> list[tuple[str, Callable[[], Any], type[Exception], str]]:
    """(what, call, error, text)"""
    x = tf.ones([12, 2])
    truth = tf.constant([True, False])
    words = tf.constant(["a", "b"])
    splits = lambda numbers: hvd.alltoall(x, splits=numbers, name="bad")  # noqa: E731
    return [
        ("root beyond", lambda: hvd.broadcast(x, 99), InvalidArgument, "root_rank=99"),
        ("root negative", lambda: hvd.broadcast(x, -1), InvalidArgument, "root_rank=-1"),
        ("root no number", lambda: hvd.broadcast(x, "0"), InvalidArgument, "root_rank='0'"),
        ("root of variables", lambda: hvd.broadcast_variables([], 99), InvalidArgument, "99"),
        ("scalar", lambda: hvd.allgather(tf.ones([])), InvalidArgument, "scalar"),
        ("scalar", lambda: hvd.alltoall(tf.ones([])), InvalidArgument, "scalar"),
        ("scalar", lambda: hvd.reducescatter(tf.ones([])), InvalidArgument, "scalar"),
        ("scalar", lambda: hvd.grouped_allgather([x, tf.ones([])]), InvalidArgument, "scalar"),
        ("bool average", lambda: hvd.allreduce(truth), InvalidArgument, "bool has no average"),
        ("bool average", lambda: hvd.reducescatter(truth), InvalidArgument, "bool has no average"),
        ("text", lambda: hvd.allreduce(words), InvalidArgument, "dtype string"),
        ("text", lambda: hvd.allgather(words), InvalidArgument, "dtype string"),
        ("text", lambda: hvd.broadcast(words, 0), InvalidArgument, "dtype string"),
        ("no tensor", lambda: hvd.allreduce(object()), InvalidArgument, "no tensor"),
        ("no tensor", lambda: hvd.allgather(object()), InvalidArgument, "no tensor"),
        ("op", lambda: hvd.allreduce(x, op=17), InvalidArgument, "op=17"),
        ("op", lambda: hvd.reducescatter(x, op="sum"), InvalidArgument, "op='sum'"),
        ("op", lambda: hvd.allreduce(x, op=hvd.Adasum), Unsupported, "Adasum"),
        ("op", lambda: hvd.reducescatter(x, op=hvd.Adasum), Unsupported, "Adasum"),
        (
            "op twice",
            lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
            InvalidArgument,
            "average",
        ),
        ("factor", lambda: hvd.allreduce(x, prescale_factor="2"), InvalidArgument, "prescale"),
        (
            "factor",
            lambda: hvd.allreduce(x, postscale_factor=float("nan")),
            *(InvalidArgument, "postscale"),
        ),
        (
            "factor",
            lambda: hvd.reducescatter(x, prescale_factor=float("inf")),
            *(InvalidArgument, "prescale"),
        ),
        ("compression", lambda: hvd.allreduce(x, compression="zip"), InvalidArgument, "zip"),
        ("compression", lambda: hvd.allreduce(x, compression=Zip), Unsupported, "one's own"),
        ("splits sum", lambda: splits([99]), InvalidArgument, "splits"),
        ("splits negative", lambda: splits([-1] + [0] * (hvd.size() - 1)), InvalidArgument, "-1"),
        ("splits real", lambda: splits([1.0]), InvalidArgument, "float32"),
        ("splits matrix", lambda: splits([[1]]), InvalidArgument, "splits"),
        ("set", lambda: hvd.allreduce(x, process_set=[0]), InvalidArgument, "ProcessSet"),
        ("set", lambda: hvd.allgather(x, process_set=0), InvalidArgument, "ProcessSet"),
        ("set", lambda: hvd.broadcast(x, 0, process_set=None), InvalidArgument, "ProcessSet"),
        ("set", lambda: hvd.alltoall(x, process_set="all"), InvalidArgument, "ProcessSet"),
        ("set", lambda: hvd.reducescatter(x, process_set=1), InvalidArgument, "ProcessSet"),
        ("set", lambda: hvd.barrier(process_set=1), InvalidArgument, "ProcessSet"),
        (
            "set not registered",
            lambda: hvd.allreduce(x, process_set=hvd.ProcessSet([0])),
            *(InvalidArgument, "not registered"),
        ),
        ("name", lambda: hvd.allreduce(x, name=3), InvalidArgument, "name=3"),
        ("name", lambda: hvd.allgather(x, name=b"x"), InvalidArgument, "name=b'x'"),
        ("no list", lambda: hvd.grouped_allreduce(3), InvalidArgument, "a list of tensors"),
        ("no list", lambda: hvd.grouped_allgather(None), InvalidArgument, "a list of tensors"),
        ("no list", lambda: hvd.grouped_reducescatter(3), InvalidArgument, "a list of tensors"),
        (
            "factor",
            lambda: hvd.allreduce(tf.ones([2], tf.int64), prescale_factor=2.0),
            *(InvalidArgument, "takes no prescale"),
        ),
    ]


@BOTH
@pytest.mark.ranks(1, 2)
@pytest.mark.smoke
def test_bad_input(mode: str, size: int) -> None:
    for what, call, kind, text in _bad():
        kinds = (kind, tf.errors.InvalidArgumentError) if mode == "graph" else kind
        function = call if mode == "eager" else tf.function(call, autograph=False)
        with pytest.raises(kinds, match=text):
            function()
            pytest.fail(f"{what}: no error")
        assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="after")) == size


@BOTH
def test_one_name_for_operations_in_turn(mode: str, rank: int, size: int) -> None:
    """H1"""
    everyone = [np.arange(12.0).reshape(6, 2) + r for r in range(size)]
    mine = np.array_split(np.arange(6), size)[rank]

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (
            hvd.allreduce(x, op=hvd.Sum, name="turn"),
            hvd.reducescatter(x, op=hvd.Sum, name="turn"),
            hvd.allgather(x, name="turn"),
            hvd.broadcast(x, 1, name="turn"),
        )

    run = step if mode == "eager" else tf.function(step, autograph=False)
    total = np.sum(everyone, 0)
    for _ in range(3):
        results = run(tf.constant(everyone[rank]))
        expected = (total, total[mine], np.concatenate(everyone), everyone[1])
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, value)
