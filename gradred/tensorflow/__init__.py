"""gradred for TensorFlow. ``import gradred.tensorflow as hvd`` runs a Horovod script.

In eager mode errors are gradred's (gradred.errors); in graphs TensorFlow raises its own, with
gradred's kind and text: "gradred Abandoned: ...".
"""

from __future__ import annotations

from typing import Any

from gradred.basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    plan,
    rank,
    shutdown,
    size,
)
from gradred.compression import Compression
from gradred.counters import metrics
from gradred.objects import allgather_object, broadcast_object
from gradred.process_sets import ProcessSet, add_process_set, global_process_set
from gradred.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from gradred.tensorflow.functions import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allreduce,
)
from gradred.tensorflow.optimizer import DistributedOptimizer
from gradred.tensorflow.tape import DistributedGradientTape
from gradred.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "plan",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def mpi_built() -> bool:
    """Always: the MPI library is found at run time. Local."""
    return True


def mpi_enabled() -> bool:
    """Whether this process has found an MPI library. Local."""
    from gradred._native import core

    return core.mpi_library() is not None


def mpi_threads_supported() -> bool:
    """Always: gradred calls MPI from one thread at a time. Local."""
    return True


def _no(*_: Any) -> bool:
    """Not a part of gradred. Local."""
    return False


gloo_built = gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = _no


def nccl_built() -> int:
    """0: NCCL is not used yet for TensorFlow's tensors. Local."""
    return 0
