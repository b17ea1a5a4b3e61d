"""The variables of a model as one vector, for optimizers that see the parameters as such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import tensorflow as tf
from gradred.errors import InvalidArgument

__all__ = ["FlatVariables"]


class FlatVariables:
    """Variables, one after the other, as a float64 vector. All is local.

    variables: TensorFlow's or Keras', of any floating dtype and shape; their order counts.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        sizes = [int(np.prod(v.shape)) for v in self._variables]
        self._ends = np.cumsum(sizes).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def get(self) -> np.ndarray:
        """The values, [len]."""
        return self.flatten(self._variables)

    def set(self, x: np.ndarray) -> None:
        """Assigns the values of a vector, [len], rounded to the variables' dtypes."""
        if np.shape(x) != (len(self),):
            raise InvalidArgument(
                f"FlatVariables: expected shape {(len(self),)}, got {np.shape(x)}"
            )
        for variable, part in zip(self._variables, np.split(x, self._ends[:-1]), strict=True):
            dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
            variable.assign(part.reshape(variable.shape).astype(dtype))

    def flatten(self, values: Sequence[Any]) -> np.ndarray:
        """Values of the variables' shapes, such as their gradients, as [len]; None counts as 0.

        Sparse gradients too.
        """
        parts = [
            np.zeros(variable.shape)
            if value is None
            else np.asarray(_dense(value), dtype=np.float64)
            for variable, value in zip(self._variables, values, strict=True)
        ]
        return np.concatenate([part.reshape(-1) for part in parts] or [np.zeros(0)])


def _dense(value: Any) -> Any:
    """Numbers and arrays stay what they are: lists would become tensors of float32."""
    plain = isinstance(value, float | list | tuple | np.ndarray)
    return value if plain else tf.convert_to_tensor(value)
