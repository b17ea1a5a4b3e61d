"""From what the user gives to tensors that can travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from gradred.arrays import DTYPES
from gradred.errors import InvalidArgument
from gradred.tensorflow.ops import static_shape

__all__ = ["as_reducible", "as_rows", "as_tensor", "declared_shape", "movable"]

# Types that are moved, not computed with, as others of the same size.
_MOVED_AS = {tf.complex64: tf.int64}


def as_tensor(value: Any, what: str) -> tf.Tensor:
    """Raises InvalidArgument, naming the call ``what``, for what is no tensor."""
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{what}: {type(value).__name__} is no tensor: {error}") from error


def as_reducible(value: Any, what: str) -> tf.Tensor:
    """A tensor of a dtype that can be reduced. Raises InvalidArgument."""
    tensor = as_tensor(value, what)
    if tensor.dtype.name not in DTYPES:
        raise InvalidArgument(
            f"{what}: dtype {tensor.dtype.name}: expected one of {', '.join(DTYPES)}"
        )
    return tensor


def as_rows(tensor: tf.Tensor, what: str) -> tf.Tensor:
    """The tensor, if it has a first dimension. Raises InvalidArgument."""
    if tensor.shape.rank == 0:
        raise InvalidArgument(f"{what}: a scalar: expected at least one dimension")
    return tensor


def movable(tensor: tf.Tensor, what: str) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """A tensor that can travel, and the function that gives its result the dtype back.

    Raises InvalidArgument for a dtype that cannot.
    """
    dtype = tensor.dtype
    if dtype in _MOVED_AS:
        return tf.bitcast(tensor, _MOVED_AS[dtype]), lambda result: tf.bitcast(result, dtype)
    if dtype.name not in DTYPES:
        known = ", ".join([*DTYPES, *(moved.name for moved in _MOVED_AS)])
        raise InvalidArgument(f"{what}: dtype {dtype.name}: expected one of {known}")
    return tensor, lambda result: result


def declared_shape(tensor: tf.Tensor) -> tuple[int, ...]:
    """-1 for dimensions that are not known.

    In eager mode none is declared, so that a loop over shapes declares one domain.
    """
    shape = static_shape(tensor)
    if shape is None:
        raise InvalidArgument(
            f"'{tensor.name}' has an unknown number of dimensions: set its shape, unknown "
            "dimensions may be None"
        )
    return (-1,) * len(shape) if tf.executing_eagerly() else shape
