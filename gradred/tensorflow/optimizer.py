"""Optimizers that reduce gradients over the ranks before they apply them."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf
from gradred.errors import InvalidArgument, Unsupported
from gradred.grouping import Groups
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp
from gradred.tensorflow import keras2, keras3
from gradred.tensorflow.reducer import GradientReducer, Options

__all__ = ["DistributedOptimizer"]

_numbers = itertools.count()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer reduce the gradients over the ranks before it applies them. Local.

    optimizer: of Keras 3 (TensorFlow backend), tf.keras 2 (not legacy) or tf.compat.v1.train. It is
    changed in place and returned: iterations, slots, schedule, class name and configuration stay,
    so that files saved with it load without gradred. It may have stepped before. LossScaleOptimizer
    may be inside or outside.

    name: of the domain; the same on all ranks. If not given "optimizer.<k>" for the k-th optimizer
    that the program wraps. compression: of Compression; None: the setting GRADRED_WIRE.
    sparse_as_dense: make tf.IndexedSlices dense; otherwise the ranks' slices are gathered. op: Sum
    or Average. gradient_predivide_factor: with Average, divide by it before the sum and by
    size/factor after it. groups: which gradients travel together: None: the setting GRADRED_GROUPS;
    "auto": order and cuts are measured during the first steps; "bytes": in the order of the graph,
    cut at GRADRED_GROUP_BYTES; a number of groups; a size such as "16MiB"; "layer"; or lists of
    variables, others then travel alone. num_groups: the same as a number for ``groups``.
    process_set: the ranks to reduce over.

    backward_passes_per_step must be 1: use Keras' ``gradient_accumulation_steps``, with which every
    micro-step is reduced. use_locking, device_dense, device_sparse, average_aggregated_gradients
    and scale_local_gradients are there for Horovod's scripts and mean nothing.

    What ``apply_gradients`` then does is collective over the process set. A None gradient counts as
    zeros where other ranks have one; None on all ranks stays None in eager mode and becomes zeros
    in a graph.

    Raises: InvalidArgument: not an optimizer, wrapped twice, bad options. Unsupported: Adasum,
    legacy Keras optimizers, backward_passes_per_step, a Keras backend other than TensorFlow.
    """
    what = "DistributedOptimizer"
    adapter = _adapter_of(optimizer)
    if backward_passes_per_step != 1:
        raise Unsupported(
            f"{what}: backward_passes_per_step={backward_passes_per_step}: expected 1; give the "
            "optimizer gradient_accumulation_steps instead"
        )
    options = Options(
        op=op,
        compression=compression,
        groups=groups if groups is not None else num_groups,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    options.check(what)
    if adapter.is_distributed(optimizer):
        raise InvalidArgument(
            f"{what}: this {type(optimizer).__name__} is distributed already: wrap it once"
        )
    domain = f"optimizer:{name}" if name else f"optimizer.{next(_numbers)}"
    return adapter.wrap(optimizer, GradientReducer(domain, options))


class _V1Adapter:
    """tf.compat.v1.train.Optimizer: gradients are reduced where they are computed."""

    @staticmethod
    def is_distributed(optimizer: Any) -> bool:
        return hasattr(optimizer, "_gradred_reducer")

    @staticmethod
    def wrap(optimizer: Any, reducer: GradientReducer) -> Any:
        base = type(optimizer)

        def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
            pairs = base.compute_gradients(self, *args, **kwargs)
            gradients, variables = zip(*pairs, strict=True)
            return list(zip(reducer.reduce(gradients, variables), variables, strict=True))

        optimizer.__class__ = type(base.__name__, (base,), {"compute_gradients": compute_gradients})
        optimizer._gradred_reducer = reducer
        return optimizer


def _adapter_of(optimizer: Any) -> Any:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _V1Adapter
    for adapter in (keras3, keras2):
        if adapter.fits(optimizer):
            return adapter
    got = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, str):
        got = f"the text {optimizer!r}"
    elif isinstance(optimizer, type):
        got = f"the class {optimizer.__qualname__} and not an instance of it"
    raise InvalidArgument(
        f"DistributedOptimizer: expected an optimizer of Keras or tf.compat.v1.train, got {got}"
    )
