"""gradred for Keras: Keras 3 on TensorFlow, and tf.keras 2. See gradred.tensorflow."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradred.basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    plan,
    rank,
    shutdown,
    size,
)
from gradred.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from gradred.compression import Compression
from gradred.counters import metrics
from gradred.keras.optimizers import DistributedOptimizer, PartialDistributedOptimizer
from gradred.process_sets import ProcessSet, add_process_set, global_process_set
from gradred.reduce_ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
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
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "plan",
    "rank",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
]


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
