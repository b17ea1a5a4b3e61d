"""A program as users write it, for the type checker: tests/unit/test_typed.py. It is never run."""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import assert_type

import gradred
import gradred.tensorflow as hvd
from gradred.common.exceptions import HorovodInternalError
from gradred.keras import callbacks


def arrays() -> np.ndarray:
    gradred.init()
    mean = gradred.allreduce(np.ones(3), gradred.Average, prescale_factor=0.5)
    assert_type(gradred.rank(), int)
    assert_type(gradred.metrics().saturated, int)
    assert_type(gradred.grouped_allreduce([mean, mean], name="two"), list[np.ndarray])
    try:
        gradred.barrier()
    except gradred.Mismatch as error:
        assert_type(error.kind, str)
    evens = gradred.add_process_set(range(0, gradred.size(), 2))
    if evens.included():
        mean = gradred.allgather(mean, process_set=evens)
    return gradred.broadcast(mean, root_rank=0)


def train(model: Any, data: Any, optimizer: Any) -> None:
    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        optimizer, compression=hvd.Compression.fp16, op=hvd.Average
    )
    model.compile(optimizer=optimizer, loss="mse")
    watch = [callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()]
    try:
        model.fit(data, callbacks=watch, verbose=1 if hvd.rank() == 0 else 0)
    except HorovodInternalError as error:
        print(error.kind, error)
    found: list[Any] = hvd.allgather_object({"rank": hvd.rank()})
    hvd.broadcast_variables(model.variables, root_rank=0)
    print(found, hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=hvd.global_process_set))


def wrong() -> None:
    gradred.no_such_name  # type: ignore[attr-defined]  # noqa: B018
    gradred.allreduce(np.ones(3), name=3)  # type: ignore[arg-type]
    hvd.broadcast(np.ones(3))  # type: ignore[call-arg]
    hvd.add_process_set("all", 3)  # type: ignore
