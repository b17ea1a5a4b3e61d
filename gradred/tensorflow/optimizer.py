"""Optimizers that reduce gradients over the ranks before they apply them."""

from __future__ import annotations

import collections
import operator
import threading
from typing import Any

from gradred.errors import InvalidArgument
from gradred.grouping import Groups
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp
from gradred.tensorflow import keras2, keras3, v1
from gradred.tensorflow.options import make_options
from gradred.tensorflow.reducer import GradientReducer
from gradred.tensorflow.wrapping import is_distributed

__all__ = ["DistributedOptimizer"]

_FAMILIES = (v1, keras3, keras2)

# Optimizers without a name that have reduced, for each process set: by its ranks, since it may not
# be registered yet; () for the global one, (-1,) for a communicator, whose ranks are not known yet.
# One that was only wrapped does not count: a rank may load a model to look at it.
_numbers: collections.Counter[tuple[int, ...]] = collections.Counter()
_lock = threading.Lock()


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

    optimizer: of Keras 3 (TensorFlow backend), tf.keras 2, its ``legacy`` module, or
    tf.compat.v1.train. It is changed in place and returned: iterations, slots, schedule, class name
    and configuration stay, so that files saved with it load without gradred. It may have stepped
    before. LossScaleOptimizer may be inside or outside. It gets a method ``register_local_var``,
    which takes a variable whose gradient stays on its rank.

    name: of the domain; the same on all ranks. If not given "optimizer.<k>" for the k-th optimizer
    that reduces, or is traced, for the process set: optimizers that train in threads of their own
    need names. compression: of Compression; None: the setting GRADRED_WIRE. sparse_as_dense: make
    tf.IndexedSlices dense; otherwise the rows that ranks have travel, or the whole if that is less.
    op: any but Adasum; tf.IndexedSlices need Sum or Average. gradient_predivide_factor: with
    Average, divide by it before the sum and by size/factor after it. groups: which gradients travel
    together: None: the setting GRADRED_GROUPS; "auto": order and cuts are measured during the first
    steps; "bytes": in the order of the graph, cut at GRADRED_GROUP_BYTES; a number of groups; a
    size such as "16MiB"; "layer"; or lists of variables, others then travel alone. num_groups:
    deprecated, the same as a number for ``groups``. process_set: the ranks to reduce over.
    scale_local_gradients: divide gradients that stay on their rank by the number of ranks of the
    set, as an average over ranks would.

    backward_passes_per_step: apply gradients every so many calls, and reduce their sums then. The
    passes between change nothing but the sums: iterations, schedules and averages of weights count
    updates. average_aggregated_gradients: divide the sums by the number of passes. The sums are
    dense, lie beside the optimizer's own state and differ between ranks; tf.train.Checkpoint saves
    them with the optimizer, files of Keras do not.

    use_locking, device_dense and device_sparse are there for Horovod's scripts and mean nothing.

    What ``apply_gradients`` then does, or ``compute_gradients`` of tf.compat.v1.train, is
    collective over the process set. A None gradient counts as zeros where other ranks have one.
    None on all ranks stays None in eager mode; in a graph optimizers of Keras leave the variable
    alone, legacy ones and others get zeros.

    Raises: InvalidArgument: not an optimizer, wrapped twice, bad options; when it runs: gradients
    that a DistributedGradientTape has reduced, gradients that nobody has reduced, a rank that is no
    member of the process set. Mismatch, when it runs: sums that some ranks alone have restored.
    Unsupported: Adasum, a Keras backend other than TensorFlow; when it
    runs: jit_compile=True.
    """
    what = "DistributedOptimizer"
    adapter = _adapter_of(optimizer)
    options = make_options(
        what,
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    passes = _passes(backward_passes_per_step, what)
    if is_distributed(optimizer):
        raise InvalidArgument(
            f"{what}: this {type(optimizer).__name__} is distributed already: wrap it once"
        )
    reducer = GradientReducer(
        lambda: _domain(name, process_set), options, passes, bool(average_aggregated_gradients)
    )
    adapter.wrap(optimizer, reducer)
    return optimizer


def _domain(name: str | None, process_set: ProcessSet) -> str:
    if name:
        return f"optimizer:{name}"
    ranks = () if process_set is global_process_set else tuple(process_set.ranks) or (-1,)
    with _lock:
        _numbers[ranks] += 1
        return f"optimizer.{_numbers[ranks] - 1}"


def _passes(number: Any, what: str) -> int:
    try:
        passes = operator.index(number)
    except TypeError:
        passes = 0
    if passes < 1:
        raise InvalidArgument(
            f"{what}: backward_passes_per_step={number!r}: expected an integer from 1"
        )
    return passes


def _adapter_of(optimizer: Any) -> Any:
    for family in _FAMILIES:
        if family.fits(optimizer):
            return family
    got = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, str):
        got = f"the text {optimizer!r}"
    elif isinstance(optimizer, type):
        got = f"the class {optimizer.__qualname__} and not an instance of it"
    raise InvalidArgument(
        f"DistributedOptimizer: expected an optimizer of Keras or tf.compat.v1.train, got {got}"
    )
