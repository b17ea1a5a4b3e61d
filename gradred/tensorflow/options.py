"""How gradients are reduced: what optimizers and tapes are told."""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass
from typing import Any

from gradred import grouping
from gradred.compression import wire_of
from gradred.errors import InvalidArgument
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp, native_name
from gradred.tensorflow import graph
from gradred.tensorflow.variables import variable_key

__all__ = ["Options", "make_options"]


@dataclass(frozen=True)
class Options:
    """See DistributedOptimizer. ``make_options`` checks what it makes."""

    op: ReduceOp | int = ReduceOp.Average
    compression: Any = None
    groups: grouping.Groups = None
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True


def make_options(
    what: str,
    *,
    op: ReduceOp | int,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: grouping.Groups,
    process_set: ProcessSet,
    scale_local_gradients: bool,
) -> Options:
    """The options of the call ``what``. Warns of ``num_groups``, which is deprecated. Local.

    Raises InvalidArgument or Unsupported, naming the call, for what cannot be.
    """
    if num_groups:
        warnings.warn(
            f"{what}: num_groups is deprecated: use groups",
            DeprecationWarning,
            stacklevel=graph.stack_level(),
        )
        groups = num_groups if groups is None else groups
    name = native_name(op, what)
    factor = gradient_predivide_factor
    if factor != 1.0 and name != "average":
        raise InvalidArgument(
            f"{what}: gradient_predivide_factor={factor} with op={op!r}: expected Average"
        )
    if not factor > 0:
        raise InvalidArgument(f"{what}: gradient_predivide_factor={factor}: expected > 0")
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgument(f"{what}: process_set={process_set!r}: expected a ProcessSet")
    wire_of(compression, "none", what)
    return Options(
        op=op,
        compression=compression,
        groups=_checked_groups(groups, what),
        gradient_predivide_factor=float(factor),
        sparse_as_dense=bool(sparse_as_dense),
        process_set=process_set,
        scale_local_gradients=bool(scale_local_gradients),
    )


def _checked_groups(groups: Any, what: str) -> grouping.Groups:
    if groups is None or isinstance(groups, list | tuple):
        grouping.keys_of(groups or (), variable_key)
        return groups
    if isinstance(groups, str):
        grouping.parse(groups)
        return groups
    try:
        number = operator.index(groups)
    except TypeError:
        number = -1
    if number < 0 or isinstance(groups, bool):
        raise InvalidArgument(
            f"{what}: groups={groups!r}: expected a number from 0, a size such as '16MiB', 'auto', "
            "'bytes', 'layer', or lists of variables"
        )
    return number
