"""Distributed optimizers, with their arguments in Horovod's order for Keras."""

from __future__ import annotations

from typing import Any

from gradred.grouping import Groups
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import Average, ReduceOp
from gradred.tensorflow import optimizer as tensorflow_optimizer
from gradred.tensorflow.variables import LocalVariables
from gradred.tensorflow.wrapping import reducer_of

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """See gradred.tensorflow.DistributedOptimizer."""
    return tensorflow_optimizer.DistributedOptimizer(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """A DistributedOptimizer that leaves the gradients of some layers on their rank. Local.

    local_layers: a layer or model of Keras, or several: all that is trainable in them is local,
    also if they are built later. None: none. Others: see gradred.tensorflow.DistributedOptimizer.

    Raises also InvalidArgument for local_layers that are none.
    """
    local = LocalVariables()
    local.add_layers(local_layers, "PartialDistributedOptimizer")
    optimizer = DistributedOptimizer(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    reducer = reducer_of(optimizer)
    assert reducer is not None
    reducer.local = local
    return optimizer
