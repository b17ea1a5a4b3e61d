"""A gradient tape whose gradients are reduced over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from gradred.errors import InvalidArgument
from gradred.grouping import Groups
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp
from gradred.tensorflow import graph
from gradred.tensorflow.reducer import Options, abandon_gradients, reduce_gradients

__all__ = ["DistributedGradientTape", "refuse_reduced"]

_KIND = "tape"

# Tapes whose gradients were reduced in eager mode, while the program still holds them.
_used: weakref.WeakSet[Any] = weakref.WeakSet()

# What programs do with gradients before they apply them: clipping, scaling, adding.
_POSTPROCESSING = frozenset(
    {
        *("Add", "AddN", "AddV2", "Cast", "CheckNumerics", "ClipByValue", "Div", "DivNoNan"),
        *("Identity", "IdentityN", "Maximum", "Minimum", "Mul", "Neg", "RealDiv", "Reshape"),
        *("Select", "SelectV2", "Sub"),
    }
)


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Makes ``gradient`` of a tape return gradients that are reduced over the ranks. Local.

    Before or after the tape has recorded; the tape itself is changed and returned. Arguments: see
    DistributedOptimizer. Its ``gradient`` is collective over the process set; the sources must be
    the same on all ranks in number and order.

    A None gradient counts as zeros where other ranks have one; None on all ranks stays None in
    eager mode and becomes zeros in a graph.

    Raises: InvalidArgument, Unsupported.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise InvalidArgument(
            f"DistributedGradientTape: expected a tf.GradientTape, got {type(gradtape).__name__}"
        )
    if isinstance(gradtape, _DistributedTape):
        raise InvalidArgument("DistributedGradientTape: this tape is distributed already")
    options = Options(
        op=op,
        compression=compression,
        groups=groups if groups is not None else num_groups,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    options.check("DistributedGradientTape")
    base = type(gradtape)
    gradtape.__class__ = type(base.__name__, (_DistributedTape, base), {})
    gradtape._gradred_options = options
    return gradtape


class _DistributedTape:
    """Comes before tf.GradientTape, or a subclass of it, in the class of a distributed tape."""

    _gradred_options: Options

    @graph.plain_python
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As tf.GradientTape.gradient, reduced over the ranks. Collective."""
        variables = tf.nest.flatten(sources)
        # Where the program is, and not the tape: loops make a tape a step.
        name = graph.domain_name(_KIND, None)
        try:
            local = super().gradient(  # type: ignore[misc]
                target, sources, output_gradients, unconnected_gradients
            )
        except Exception as error:
            if tf.executing_eagerly() and variables:
                reason = f"{type(error).__name__}: {error}"[:1000]
                abandon_gradients(name, variables, self._gradred_options, reason)
            raise
        if not variables:
            return local
        gradients = tf.nest.flatten(local)
        reduced = reduce_gradients(name, gradients, variables, self._gradred_options)
        if tf.executing_eagerly():
            self._gradred_sources = {id(variable) for variable in variables}
            _used.add(self)
        return tf.nest.pack_sequence_as(sources, reduced)


def refuse_reduced(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises InvalidArgument if a tape has reduced these gradients already.

    In a graph gradients are followed back through clipping and scaling. In eager mode nothing
    leads back, so it is an error if a distributed tape that the program still holds was asked for
    gradients of the same variables.
    """
    if tf.executing_eagerly():
        for tape in list(_used):
            twice = [v for v in variables if id(v) in tape._gradred_sources]
            if twice:
                _refuse(twice[0])
        return
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None and _comes_from_tape(gradient):
            _refuse(variable)


def _refuse(variable: Any) -> None:
    name = getattr(variable, "path", None) or variable.name
    raise InvalidArgument(
        f"the gradient of '{name}' is reduced by a DistributedGradientTape and would be again by a "
        "distributed optimizer: use one of the two"
    )


def _comes_from_tape(gradient: Any) -> bool:
    start = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    waiting, seen = [start], set()
    while waiting:
        tensor = waiting.pop()
        tensor = _outside(tensor)
        op = tensor.op
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type == "GradredWait":
            domain = op.inputs[0].op.get_attr("domain")
            if domain.startswith(f"{_KIND}:".encode()):
                return True
        elif op.type in _POSTPROCESSING:
            waiting.extend(op.inputs)
    return False


def _outside(tensor: tf.Tensor) -> tf.Tensor:
    """What a function's captured input stands for."""
    while tensor.op.type == "Placeholder":
        outer = next((o for o, i in getattr(tensor.graph, "captures", ()) if i is tensor), None)
        if outer is None or not hasattr(outer, "graph"):
            break
        tensor = outer
    return tensor
