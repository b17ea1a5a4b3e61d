"""Telling variables apart, and those whose gradients stay on their rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradred.errors import InvalidArgument

__all__ = ["LocalVariables", "label_of", "variable_key"]


def variable_key(variable: Any) -> int:
    """What a variable is known by while it lives: names need not be unique.

    The same for a variable of Keras and the tf.Variable in it.
    """
    for attribute in ("_value", "_variable"):  # keras.Variable; Keras 2's AutoCastVariable
        inner = variable.__dict__.get(attribute) if hasattr(variable, "__dict__") else None
        if inner is not None and hasattr(inner, "assign"):
            return variable_key(inner)
    return id(variable)


def label_of(variable: Any) -> str:
    """A variable's name for messages: "dense/kernel"."""
    try:
        name = getattr(variable, "path", None) or variable.name
    except AttributeError:  # a tensor in eager mode
        name = f"{variable.dtype.name}{list(variable.shape)}"
    return str(name).removesuffix(":0")


class LocalVariables:
    """Variables and layers that the user has named as local to each rank."""

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._layers: list[Any] = []

    def add(self, variable: Any) -> None:
        """A variable, or a tensor that is a source of a tape."""
        self._variables.append(variable)

    def add_layers(self, layers: Any, what: str) -> None:
        """A layer or model, or several: also variables that they get later count.

        Raises InvalidArgument, naming the call ``what``, for what is none.
        """
        if layers is None:
            return
        if hasattr(layers, "trainable_weights") or not isinstance(layers, Iterable):
            layers = [layers]
        layers = list(layers)
        for layer in layers:
            if not hasattr(layer, "trainable_weights"):
                raise InvalidArgument(
                    f"{what}: local_layers: expected layers of Keras, got {type(layer).__name__}"
                )
        self._layers += layers

    def keys(self) -> frozenset[int]:
        """The keys (see ``variable_key``) of all of them now."""
        if not self._variables and not self._layers:
            return frozenset()
        weights = [w for layer in self._layers for w in layer.trainable_weights]
        return frozenset(variable_key(v) for v in [*self._variables, *weights])
