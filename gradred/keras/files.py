"""Models from files, ready to train on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from gradred.tensorflow.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model of Keras and makes its optimizer a distributed one. Local.

    filepath: what keras.models.load_model takes; saved with or without a distributed optimizer.
    custom_optimizers: optimizer classes that are not Keras' own. custom_objects: see there.
    compression: see DistributedOptimizer; for other options wrap ``model.optimizer`` of a model
    that Keras loaded. legacy_opts means nothing: the file names the optimizer's class.

    Returns: the model with the state of its optimizer; without a change if the file has no
    optimizer. Training goes on as if the model had never been saved.

    Raises: what Keras raises; Unsupported: see DistributedOptimizer.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        if getattr(model, "jit_compile", False):  # decided before the optimizer was distributed
            model.jit_compile = False
    return model
