"""Sums of gradients over several backward passes, of which the last is followed by an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Accumulation"]


class Accumulation(tf.Module):  # type: ignore[misc]
    """What the passes since the last update have brought, on this rank, for a list of variables.

    count: how many passes that are. sums: one a variable, dense. brought: which variables have had
    a gradient. All are tf.Variables, saved by tf.train.Checkpoint and by v1's Saver; they differ
    between ranks, but for the count. made: how many of the passes this process has made itself;
    a checkpoint has brought the others.
    """

    def __init__(self, passes: int, variables: Sequence[Any]) -> None:
        super().__init__(name="gradred_accumulation")
        self.passes = passes
        with tf.init_scope():
            self.count = tf.Variable(0, trainable=False, dtype=tf.int64, name="gradred_count")
            self.brought = tf.Variable(
                [False] * len(variables), trainable=False, name="gradred_brought"
            )
            self.sums = [_zeros_for(variable) for variable in variables]
            made = tf.Variable(0, trainable=False, dtype=tf.int64, name="gradred_made")
            object.__setattr__(self, "made", made)  # past what tf.train.Checkpoint saves

    def is_last(self) -> Any:
        """Whether the pass at hand is followed by an update: a bool, in a graph a tensor."""
        if tf.executing_eagerly():
            return int(self.count) + 1 >= self.passes
        return self.count.read_value() + 1 >= self.passes

    def step(
        self,
        last: Any,
        gradients: Sequence[Any],
        reduce: Callable[[list[Any], Any], list[Any]],
        finish: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Adds a pass's gradients. Local, but what ``reduce`` does.

        last: from ``is_last``. reduce, finish: on the last pass, ``finish(reduce(sums, made))``,
        after which the sums begin anew; a failed ``reduce`` leaves them as they were. made: with
        the pass at hand. skip: on the others, in place of finish. gradients: tensors,
        tf.IndexedSlices or None.

        Returns what ``finish`` or ``skip`` returns; in a graph both must return the like.
        """

        def update() -> Any:
            reduced = reduce(self._totals(gradients), self.made.read_value() + 1)
            with tf.control_dependencies(_tensors(reduced)):
                reset = self._reset()
            with tf.control_dependencies(reset):
                return finish(reduced)

        def wait() -> Any:
            with tf.control_dependencies(self._add(gradients)):
                return skip()

        if tf.executing_eagerly():
            return update() if last else wait()
        return tf.cond(last, update, wait)

    def _totals(self, gradients: Sequence[Any]) -> list[Any]:
        """The sums with the gradients at hand; None where no pass has had one, in eager mode."""
        brought = self.brought.numpy() if tf.executing_eagerly() else None
        totals: list[Any] = [None] * len(gradients)
        # The order in which a graph makes them is that in which they travel: the last layers first.
        for i in reversed(range(len(gradients))):
            gradient, held = gradients[i], self.sums[i]
            if gradient is None:
                if brought is None or brought[i]:
                    totals[i] = held.read_value()
            elif isinstance(gradient, tf.IndexedSlices):
                totals[i] = tf.tensor_scatter_nd_add(
                    held.read_value(),
                    gradient.indices[:, tf.newaxis],
                    tf.cast(gradient.values, held.dtype),
                )
            else:
                totals[i] = held.read_value() + tf.cast(gradient, held.dtype)
        return totals

    def _add(self, gradients: Sequence[Any]) -> list[Any]:
        here = [gradient is not None for gradient in gradients]
        done = [self.count.assign_add(1), self.made.assign_add(1)]
        done.append(self.brought.assign(self.brought.read_value() | here))
        for held, gradient in zip(self.sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                values = tf.cast(gradient.values, held.dtype)
                done.append(held.scatter_add(tf.IndexedSlices(values, gradient.indices)))
            elif gradient is not None:
                done.append(held.assign_add(tf.cast(gradient, held.dtype)))
        return _operations(done)

    def _reset(self) -> list[Any]:
        done = [self.count.assign(0), self.made.assign(0)]
        done.append(self.brought.assign([False] * len(self.sums)))
        done += [held.assign(tf.zeros_like(held)) for held in self.sums]
        return _operations(done)


def _zeros_for(variable: Any) -> tf.Variable:
    dtype, shape = tf.as_dtype(variable.dtype), tf.TensorShape(variable.shape)
    zeros = tf.zeros(shape, dtype) if shape.is_fully_defined() else tf.zeros_like(variable)
    return tf.Variable(zeros, trainable=False, shape=shape, name="gradred_sum")


def _tensors(gradients: Sequence[Any]) -> list[Any]:
    """What control dependencies in a graph are made of."""
    if tf.executing_eagerly():
        return []
    return [
        gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient in gradients
        if gradient is not None
    ]


def _operations(updates: Sequence[Any]) -> list[Any]:
    """As ``_tensors``, of assignments."""
    return [] if tf.executing_eagerly() else [tf.group(*updates)]
