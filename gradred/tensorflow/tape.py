"""A gradient tape whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from gradred.errors import InvalidArgument, Unsupported
from gradred.grouping import Groups
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp
from gradred.tensorflow import graph
from gradred.tensorflow.guard import TAPE, note_tape
from gradred.tensorflow.options import Options, make_options
from gradred.tensorflow.reducer import abandon_gradients, reduce_gradients
from gradred.tensorflow.variables import LocalVariables, variable_key

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

_Pairs = list[tuple[Any, Any]]


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
    the same on all ranks in number and order. It gets two methods: ``register_local_source``, which
    takes a source whose gradient stays on its rank, and ``get_local_and_global_gradients``.

    ``jacobian`` and ``batch_jacobian`` are this rank's: nothing is reduced. All else is as it was.

    A None gradient counts as zeros where other ranks have one; None on all ranks stays None in
    eager mode and becomes zeros in a graph.

    Raises: InvalidArgument, Unsupported.
    """
    return _distribute(
        gradtape,
        "DistributedGradientTape",
        LocalVariables(),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
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
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """A DistributedGradientTape that leaves the gradients of some layers on their rank. Local.

    local_layers: a layer or model of Keras, or several: all that is trainable in them is local,
    also if they are built later. None: none. Others: see DistributedGradientTape.
    """
    local = LocalVariables()
    local.add_layers(local_layers, "PartialDistributedGradientTape")
    return _distribute(
        gradtape,
        "PartialDistributedGradientTape",
        local,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def _distribute(
    gradtape: tf.GradientTape, what: str, local: LocalVariables, **options: Any
) -> tf.GradientTape:
    if not isinstance(gradtape, tf.GradientTape):
        raise InvalidArgument(f"{what}: expected a tf.GradientTape, got {type(gradtape).__name__}")
    if isinstance(gradtape, _DistributedTape):
        raise InvalidArgument(f"{what}: this tape is distributed already")
    checked = make_options(what, **options)
    base = type(gradtape)
    gradtape.__class__ = type(base.__name__, (_DistributedTape, base), {})
    gradtape._gradred_options = checked
    gradtape._gradred_local = local
    gradtape._gradred_alone = False
    return gradtape


class _DistributedTape:
    """Comes before tf.GradientTape, or a subclass of it, in the class of a distributed tape."""

    _gradred_options: Options
    _gradred_local: LocalVariables
    _gradred_alone: bool  # ``gradient`` is called for a Jacobian: reduces nothing

    def register_local_source(self, source: Any) -> None:
        """The gradient of ``source`` stays on this rank. Local."""
        self._gradred_local.add(source)

    @graph.plain_python
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As tf.GradientTape.gradient, reduced over the ranks. Collective.

        use_generic_names: name the call by nothing that depends on where it is made, so that ranks
        may make it in different places. In Horovod's order it comes fourth: a bool there is it.
        """
        if isinstance(unconnected_gradients, bool):
            use_generic_names = unconnected_gradients
            unconnected_gradients = tf.UnconnectedGradients.NONE
        arguments = (target, sources, output_gradients, unconnected_gradients)
        if self._gradred_alone:
            return super().gradient(*arguments)  # type: ignore[misc]
        variables = tf.nest.flatten(sources)
        if any(isinstance(v, tf.RaggedTensor) for v in variables):
            raise Unsupported("DistributedGradientTape.gradient: sources that are RaggedTensors")
        options, local_keys = self._gradred_options, self._gradred_local.keys()
        # Where the program is, and not the tape: loops make a tape a step.
        generic = f"{TAPE}:gradient" if use_generic_names else None
        name = graph.domain_name(TAPE, generic, options.process_set)
        try:
            local = super().gradient(*arguments)  # type: ignore[misc]
        except Exception as error:
            if tf.executing_eagerly():
                reason = f"{type(error).__name__}: {error}"[:1000]
                abandon_gradients(name, variables, options, local_keys, reason)
            raise
        if not variables:
            return local
        gradients = tf.nest.flatten(local)
        reduced = reduce_gradients(name, gradients, variables, options, local_keys)
        note_tape(self, variables)
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[_Pairs, _Pairs]:
        """Calls ``gradient``, and tells what is local from what is reduced. Collective.

        Returns: two lists of pairs of a source and its gradient: of the local sources, and of the
        others, each in the order of ``sources``.
        """
        gradients = self.gradient(
            target, sources, output_gradients, use_generic_names=use_generic_names
        )
        keys = self._gradred_local.keys()
        local: _Pairs = []
        others: _Pairs = []
        for source, gradient in zip(
            tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True
        ):
            (local if variable_key(source) in keys else others).append((source, gradient))
        return local, others

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As tf.GradientTape.jacobian, of this rank's target. Local."""
        with self._alone():
            return super().jacobian(*args, **kwargs)  # type: ignore[misc]

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As tf.GradientTape.batch_jacobian, of this rank's target. Local."""
        with self._alone():
            return super().batch_jacobian(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._gradred_alone = True
        try:
            yield
        finally:
            self._gradred_alone = False
