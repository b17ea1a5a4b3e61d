"""gradred for Keras: Keras 3 on TensorFlow, and tf.keras 2. See gradred.tensorflow."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradred.common import names
from gradred.common.names import *  # noqa: F403
from gradred.keras.optimizers import DistributedOptimizer, PartialDistributedOptimizer
from gradred.reduce_ops import Average, ReduceOp
from gradred.tensorflow import (
    SyncBatchNormalization,
    allgather_object,
    barrier,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    exchanges,
    functions,
)

from gradred.keras import callbacks, elastic  # isort: skip
from gradred.keras.files import load_model  # isort: skip

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += names.__all__


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | int | None = None,
    compression: Any = None,
) -> Any:
    """gradred.tensorflow.allreduce, as a NumPy array in eager mode. Collective."""
    return _value(
        functions.allreduce(
            value,
            average=average,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """gradred.tensorflow.allgather, as a NumPy array in eager mode. Collective."""
    return _value(exchanges.allgather(value, name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """gradred.tensorflow.broadcast, as a NumPy array in eager mode. Collective."""
    return _value(functions.broadcast(value, root_rank, name=name))


def reducescatter(
    value: Any,
    name: str | None = None,
    op: ReduceOp | int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """gradred.tensorflow.reducescatter, as a NumPy array in eager mode. Collective."""
    return _value(
        exchanges.reducescatter(
            value,
            op=op,
            name=name,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
    )


def _value(tensor: Any) -> np.ndarray | Any:
    return tensor.numpy() if hasattr(tensor, "numpy") else tensor
