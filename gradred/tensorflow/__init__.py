"""gradred for TensorFlow. ``import gradred.tensorflow as hvd`` runs a Horovod script.

In eager mode errors are gradred's (gradred.errors); in graphs TensorFlow raises its own, with
gradred's kind and text: "gradred Abandoned: ...".
"""

from __future__ import annotations

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
from gradred.process_sets import ProcessSet, add_process_set, global_process_set
from gradred.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from gradred.tensorflow import elastic
from gradred.tensorflow.exchanges import (
    allgather,
    alltoall,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from gradred.tensorflow.functions import (
    allreduce,
    barrier,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allreduce,
)
from gradred.tensorflow.objects import allgather_object, broadcast_object, broadcast_object_fn
from gradred.tensorflow.optimizer import DistributedOptimizer
from gradred.tensorflow.sessions import (
    BroadcastGlobalVariablesHook,
    broadcast_global_variables,
)
from gradred.tensorflow.sync_batch_norm import SyncBatchNormalization
from gradred.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from gradred.tensorflow.world import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from gradred.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "plan",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
