"""Batch normalization with the statistics of all ranks' samples."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from gradred.errors import InvalidArgument, Unsupported
from gradred.process_sets import ProcessSet, global_process_set
from gradred.tensorflow import differentiable, graph

__all__ = ["SyncBatchNormalization"]

_KERAS_3 = int(getattr(tf.keras, "__version__", "2").split(".")[0]) >= 3
_REFUSED = ("renorm", "virtual_batch_size", "adjustment")


@tf.keras.utils.register_keras_serializable(package="gradred")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """keras.layers.BatchNormalization over the samples of all ranks.

    In training mean and variance are those of the joined batch: each rank counts by its number of
    samples, which may be 0. So are the moving statistics, which are equal on all ranks if they
    began so, and the gradients: each rank's is the derivative of the sum of the ranks' losses. One
    allreduce a call (two if the input is float64) and one in the backward pass. With
    training=False, or trainable=False, the layer is that of Keras, and local.

    fused: must be False. process_set: the ranks that share statistics; or their numbers, for a set
    that is registered later, as in a model that is loaded. Other arguments: those of Keras' layer,
    without renorm, virtual_batch_size and adjustment. mask: bool, without the inputs' last
    dimension; where it is False, elements do not count.

    A file with this layer needs it: ``import gradred.tensorflow`` before loading, or
    custom_objects={"gradred>SyncBatchNormalization": keras.layers.BatchNormalization}.

    Calls in training are collective over the process set. The ranks' k-th calls meet, whatever the
    layers' names.

    Raises: InvalidArgument, Unsupported; in training see gradred.tensorflow.allreduce.
    """

    def __init__(
        self,
        fused: bool | None = False,
        process_set: ProcessSet | Iterable[int] = global_process_set,
        **kwargs: Any,
    ) -> None:
        what = kwargs.get("name") or type(self).__name__
        if fused is not False:
            raise InvalidArgument(f"{what}: fused={fused}: expected False")
        for option in _REFUSED:
            if kwargs.get(option):
                raise Unsupported(f"{what}: {option}={kwargs[option]!r}: expected none")
        if not _KERAS_3:
            kwargs["fused"] = False
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA cannot run a reduction
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set)
        self.process_set = process_set

    @graph.plain_python
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """The normalized inputs, of their shape. Collective in training."""
        local = functools.partial(super().call, inputs, training=False)
        if _KERAS_3:
            training = bool(training and self.trainable)
        else:
            training = self._get_training_value(training)
        if tf.is_tensor(training):  # in a graph of Keras 2 that serves both
            together = functools.partial(self._normalize, inputs, mask)
            return tf.cond(tf.cast(training, tf.bool), together, local)
        return self._normalize(inputs, mask) if training else local()

    def get_config(self) -> dict[str, Any]:
        """Keras' configuration, and the ranks if they are not all."""
        config: dict[str, Any] = super().get_config()
        if self.process_set is not global_process_set:
            config["process_set"] = list(self.process_set.ranks)
        return config

    def _normalize(self, inputs: tf.Tensor, mask: Any) -> tf.Tensor:
        inputs = tf.convert_to_tensor(inputs)
        x = inputs if inputs.dtype == tf.float64 else tf.cast(inputs, tf.float32)
        kept = [self.axis] if isinstance(self.axis, int) else list(self.axis)
        kept = [axis % x.shape.rank for axis in kept]
        name = graph.domain_name("sync_batch_norm", None, self.process_set)
        found = joint_moments(x, kept, self._counting(x, mask), name, self.process_set)
        updates = self._move(found)

        def parameter(variable: Any) -> tf.Tensor:
            return tf.reshape(tf.cast(variable, x.dtype), found.variance.shape)

        scale = tf.cast(tf.math.rsqrt(found.variance + self.epsilon), x.dtype)
        if self.scale:
            scale *= parameter(self.gamma)
        offset = -tf.cast(found.shift, x.dtype) * scale
        if self.center:
            offset += parameter(self.beta)
        with tf.control_dependencies(updates):
            return tf.cast(found.centered * scale + offset, inputs.dtype)

    def _counting(self, x: tf.Tensor, mask: Any) -> tf.Tensor | None:
        if mask is None:
            return None
        mask = tf.cast(mask, tf.bool)
        if mask.shape.rank != x.shape.rank - 1:
            raise InvalidArgument(
                f"{self.name}: a mask of shape {mask.shape} for inputs of shape {x.shape}: "
                "expected their shape without the last dimension"
            )
        return tf.broadcast_to(mask[..., tf.newaxis], tf.shape(x))

    def _move(self, found: _Moments) -> list[Any]:
        """Moves the moving statistics, unless no rank had a sample.

        Returns what must run for it. In graphs of Keras 2 the outputs have to ask for that.
        """
        rate = tf.where(found.count > 0, tf.constant(self.momentum, tf.float64), 1.0)
        rate = tf.stop_gradient(tf.reshape(rate, [-1]))
        updates = []
        for variable, value in (
            (self.moving_mean, found.mean),
            (self.moving_variance, found.variance),
        ):
            before = tf.cast(variable, tf.float64)
            value = tf.stop_gradient(tf.reshape(value, [-1]))
            after = tf.reshape(before, [-1]) * rate + value * (1.0 - rate)
            after = tf.cast(tf.reshape(after, before.shape), variable.dtype)
            updates.append(variable.assign(after))
        return [] if _KERAS_3 else updates


@dataclass(frozen=True)
class _Moments:
    """Of all ranks' elements, by channel, float64, broadcastable to x. See ``joint_moments``."""

    count: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor
    centered: tf.Tensor  # x without about its mean on this rank, of x's dtype
    shift: tf.Tensor  # what is left of the mean in ``centered``


# Note [Moments of all ranks]
# A channel's elements x_i on rank r have count n_r, mean m_r and sum of squares M_r about m_r. Two
# passes over x: first a center c_r, the mean as x's dtype has it, then sums over x - c_r, which are
# small numbers; from there on float64. For any reference K, the same on all ranks,
#     N = sum n_r,   S = sum n_r (m_r - K),   Q = sum M_r + n_r (m_r - K)^2,
#     mean = K + S / N,   variance = Q / N - (S / N)^2,
# so that one allreduce of (n_r, n_r (m_r - K), M_r + n_r (m_r - K)^2) does, and its adjoint is one
# as well. (A gather of n_r, m_r, M_r would grow with the number of ranks.) The difference loses
# (mean - K)^2 / variance in relative precision of float64, 1e-16. For float32 and shorter inputs
# K = 0 is as good as any: their own rounding changes the variance by more, (1e-7 mean)^2 / 12. For
# float64 inputs K is the mean of the centers, found by a reduction of its own.
# c_r and K are constants to differentiation: the result does not depend on them. What could cancel
# in the backward pass does so by channel, in float64, before it meets x.
def joint_moments(
    x: tf.Tensor,
    kept: list[int],
    counting: tf.Tensor | None,
    name: str,
    process_set: ProcessSet,
) -> _Moments:
    """Mean and variance of x over all ranks and all dimensions but ``kept``. Collective.

    x: float32 or float64, of a known number of dimensions; those of ``kept`` have known sizes,
    alike on all ranks. counting: bool, of x's shape: which elements count; None: all. Can be
    differentiated any number of times. See Note [Moments of all ranks].
    """
    process_set.require_member(name)
    axes = [axis for axis in range(x.shape.rank) if axis not in kept]
    shape = [x.shape[axis] if axis in kept else 1 for axis in range(x.shape.rank)]

    def add(values: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.reduce_sum(values, axes), shape)

    def choose(values: tf.Tensor) -> tf.Tensor:
        return values if counting is None else tf.where(counting, values, tf.zeros_like(values))

    if counting is None:
        sizes = tf.gather(tf.shape(x, tf.int64), axes)
        count = tf.reshape(tf.cast(tf.reduce_prod(sizes), tf.float64), [1] * len(shape))
    else:
        count = add(tf.cast(counting, tf.float64))
    total = tf.stop_gradient(add(choose(x)))
    center = tf.math.divide_no_nan(total, tf.cast(count, x.dtype))
    centered = x - center
    small = choose(centered)
    rest = tf.math.divide_no_nan(tf.cast(add(small), tf.float64), count)
    squares = tf.cast(add(tf.square(small)), tf.float64) - count * tf.square(rest)
    center = tf.cast(center, tf.float64)

    reference = tf.zeros_like(center)
    if x.dtype == tf.float64:
        sums = _sum([count, count * center], f"{name}.reference", process_set)
        reference = tf.math.divide_no_nan(sums[1], sums[0])
    apart = (center - reference) + rest  # not center + rest first: that would be rounded
    parts = [count, count * apart, squares + count * tf.square(apart)]
    many, first, second = _sum(parts, name, process_set)
    first = tf.math.divide_no_nan(first, many)
    variance = tf.math.divide_no_nan(second, many) - tf.square(first)
    return _Moments(
        count=many,
        mean=reference + first,
        variance=tf.maximum(variance, 0.0),
        centered=centered,
        shift=(reference - center) + first,
    )


def _sum(parts: list[tf.Tensor], name: str, process_set: ProcessSet) -> list[tf.Tensor]:
    """Each part's sum over the ranks, as one tensor on the way."""
    if process_set.size() == 1:
        return parts
    joined = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
    [summed] = differentiable.allreduce(
        [joined], "sum", differentiable.NO_WIRE, (1.0, 1.0), name, process_set
    )
    sizes = [part.shape.num_elements() for part in parts]
    return [
        tf.reshape(s, part.shape) for s, part in zip(tf.split(summed, sizes), parts, strict=True)
    ]
