"""Optimizers of tf.compat.v1.train: reduce where gradients are computed. See wrapping.py."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf
from gradred.tensorflow.graph import outermost_graph
from gradred.tensorflow.guard import refuse_reduced
from gradred.tensorflow.reducer import GradientReducer
from gradred.tensorflow.variables import variable_key
from gradred.tensorflow.wrapping import after, become_distributed, nothing

__all__ = ["fits", "wrap"]


def fits(optimizer: Any) -> bool:
    """Whether it is one of tf.compat.v1.train."""
    return isinstance(optimizer, tf.compat.v1.train.Optimizer)


class _Eager:
    """Stands for a graph in eager mode."""


_eager = _Eager()


def wrap(optimizer: Any, reducer: GradientReducer) -> None:
    """Makes the optimizer distributed.

    ``compute_gradients`` reduces; programs clip what it returns before they apply it. Gradients
    that come to ``apply_gradients`` without it are reduced there.
    """
    base = type(optimizer)
    # For each graph, branches included, and variable with gradients that were computed and not yet
    # applied: whether the passes, in their order, are followed by an update.
    computed: weakref.WeakKeyDictionary[Any, dict[int, list[Any]]] = weakref.WeakKeyDictionary()

    def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        pairs, last = _reduce(reducer, base.compute_gradients(self, *args, **kwargs))
        waiting = computed.setdefault(_graph(), {})
        for _, variable in pairs:
            waiting.setdefault(variable_key(variable), []).append(last)
        return pairs

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs, waiting = list(grads_and_vars), computed.get(_graph(), {})
        if not pairs:
            return base.apply_gradients(self, pairs, *args, **kwargs)  # its own error
        passes = [waiting.get(variable_key(variable)) for _, variable in pairs]
        reduced = [of_variable.pop(0) for of_variable in passes if of_variable]
        if reduced:
            last = reduced[0]
        else:
            refuse_reduced(*zip(*pairs, strict=True))
            pairs, last = _reduce(reducer, pairs)

        def apply() -> Any:
            return base.apply_gradients(self, pairs, *args, **kwargs)

        if isinstance(last, bool):
            return apply() if last else None
        with tf.init_scope():  # not in a branch of the graph
            self._create_slots([variable for _, variable in pairs])
        return tf.cond(last, lambda: after(apply()), nothing).op

    methods = {"compute_gradients": compute_gradients, "apply_gradients": apply_gradients}
    become_distributed(optimizer, reducer, methods)


def _reduce(reducer: GradientReducer, pairs: list[tuple[Any, Any]]) -> tuple[list[Any], Any]:
    """The pairs with reduced gradients, and whether they are to be applied: else they are zeros."""
    gradients, variables = zip(*pairs, strict=True)
    if reducer.passes == 1:
        return list(zip(reducer.reduce(gradients, variables), variables, strict=True)), True
    sums = reducer.accumulation(variables)
    last = sums.is_last()

    def zeros() -> list[Any]:
        return [tf.zeros_like(held) for held in sums.sums]

    def finish(reduced: list[Any]) -> list[Any]:  # in sessions operations run for their outputs
        return [None if g is None else tf.identity(g) for g in reduced]

    def reduce(totals: list[Any], made: Any) -> list[Any]:
        return reducer.reduce_sums(totals, made, variables)

    reduced = sums.step(last, gradients, reduce, finish, zeros)
    if not tf.executing_eagerly():
        with tf.control_dependencies(reduced):
            last = tf.identity(last)
    return list(zip(reduced, variables, strict=True)), last


def _graph() -> Any:
    return _eager if tf.executing_eagerly() else outermost_graph()
