"""Callbacks for ``fit``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gradred
import tensorflow as tf
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import Average, Min
from gradred.tensorflow.functions import broadcast_variables

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]

# The one that the program uses: Keras 3 if imported, else what tf.keras is.
_Callback: Any = (sys.modules.get("keras") or tf.keras).callbacks.Callback


class BroadcastGlobalVariablesCallback(_Callback):
    """Gives all ranks the root's model and optimizer state when training begins.

    Before the first batch if all ranks have built model and optimizer by then, else after it.

    root_rank: the rank whose state is taken. device means nothing. local_variables: variables that
    keep their own values on each rank.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: list[Any] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.process_set = process_set
        self._local = {id(variable) for variable in local_variables or ()}
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        if self._done:
            return
        # A rank that resumes has its optimizer's slots already: all or none go first.
        built = np.int32(_is_built(self.model))
        everywhere = gradred.allreduce(
            built, op=Min, name="gradred.keras.built", process_set=self.process_set
        )
        if everywhere:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        variables = {id(v): v for v in self.model.variables}
        variables.update((id(v), v) for v in _optimizer_variables(self.model.optimizer))
        shared = [v for key, v in variables.items() if key not in self._local]
        broadcast_variables(shared, self.root_rank, process_set=self.process_set)
        self._done = True


class MetricAverageCallback(_Callback):
    """Replaces the metrics of an epoch by their averages over the ranks, not weighted.

    Put it in front of callbacks that read them: ReduceLROnPlateau, ModelCheckpoint, TensorBoard.
    All ranks need the same metrics. device means nothing.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        averages = gradred.allreduce(
            np.array([float(logs[name]) for name in names]),
            op=Average,
            name="metrics " + ", ".join(names),
            process_set=self.process_set,
        )
        for name, value in zip(names, averages, strict=True):
            logs[name] = float(value)


def _is_built(model: Any) -> bool:
    optimizer = model.optimizer
    built = getattr(optimizer, "built", None)
    if built is None:  # Keras 2
        built = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_built", False)
    return bool(model.built and built)


def _optimizer_variables(optimizer: Any) -> list[Any]:
    variables = optimizer.variables
    found = list(variables() if callable(variables) else variables)
    # Keras 2 keeps the state of the loss scale apart.
    scale = getattr(optimizer, "_loss_scale", None)
    if scale is not None and hasattr(scale, "current_loss_scale"):
        found += [scale.current_loss_scale, scale.counter]
    return found
