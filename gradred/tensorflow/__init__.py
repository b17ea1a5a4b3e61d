"""gradred for TensorFlow. ``import gradred.tensorflow as hvd`` runs a Horovod script.

In eager mode errors are gradred's (gradred.errors); in graphs TensorFlow raises its own, with
gradred's kind and text: "gradred Abandoned: ...".
"""

from __future__ import annotations

from gradred.common import names
from gradred.common.names import *  # noqa: F403
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
    join,
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

__all__ = [
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
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
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += names.__all__
