"""Callbacks for ``fit``. All ranks need the same, in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradred
import tensorflow as tf
from gradred.errors import Abandoned, InvalidArgument
from gradred.keras.averages import AveragingCallback
from gradred.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import Min
from gradred.tensorflow.functions import broadcast_variables

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "EarlyStopping",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's model and optimizer state when training begins.

    Before the first batch if all ranks have built model and optimizer by then, else after it. The
    states of random generators stay each rank's own.

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
        variables = {id(v): v for v in self.model.weights}
        variables.update((id(v), v) for v in _optimizer_variables(self.model.optimizer))
        shared = [v for key, v in variables.items() if key not in self._local]
        broadcast_variables(shared, self.root_rank, process_set=self.process_set)
        self._done = True


class MetricAverageCallback(AveragingCallback):
    """Replaces the metrics of an epoch by their averages over the samples of all ranks.

    Each rank counts by the number of its samples. A metric that only some ranks have, such as a
    validation that rank 0 alone makes, is added on the others. Put it in front of callbacks that
    read metrics: ReduceLROnPlateau, ModelCheckpoint, TensorBoard. device means nothing.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__(process_set=process_set)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        averages = self.averages(logs, "MetricAverageCallback")
        if logs is not None:
            logs.update(averages)


class EarlyStopping(AveragingCallback, tf.keras.callbacks.EarlyStopping):  # type: ignore[misc]
    """keras.callbacks.EarlyStopping that stops all ranks after the same epoch.

    It decides by averages over the samples of all ranks, as MetricAverageCallback makes them; that
    one need not be there. process_set: the ranks that stop together. Other arguments: those of
    Keras' callback. With restore_best_weights each rank restores its own weights of the best epoch.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, {**(logs or {}), **self.averages(logs, "EarlyStopping")})


class BestModelCheckpoint(AveragingCallback, tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """keras.callbacks.ModelCheckpoint that keeps the best model, written by one rank.

    What is best is decided by averages over the samples of all ranks, as MetricAverageCallback
    makes them. The first rank of the process set writes, and the others wait; ``best`` is the same
    on all. filepath may be set later, until training begins, and is needed on the rank that writes.
    monitor, verbose, save_weights_only, mode, save_freq: see Keras' callback.

    Raises, in training: InvalidArgument without a path; on the rank that writes what Keras raises,
    and Abandoned with its text on the others.
    """

    best: Any

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        unset = "unset.weights.h5" if save_weights_only else "unset.keras"
        super().__init__(
            unset if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
            process_set=process_set,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None and self._writes():
            raise InvalidArgument("BestModelCheckpoint: filepath is not set")
        super().on_train_begin(logs)

    def _writes(self) -> bool:
        return gradred.rank() == self.process_set.ranks[0]

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        """Where Keras decides, and writes."""
        logs = {**(logs or {}), **self.averages(logs, "BestModelCheckpoint")}
        failure: Exception | None = None
        if self._writes():
            try:
                if self.monitor_op is None:  # Keras 3 makes it at the end of an epoch alone
                    self._set_monitor_op()
                super()._save_model(epoch, batch, logs)
            except Exception as error:
                failure = error
        text = failure and f"{type(failure).__name__}: {failure}"
        writer = self.process_set.ranks[0]
        self.best, text = gradred.broadcast_object(
            (self.best, text), writer, "BestModelCheckpoint.best", process_set=self.process_set
        )
        if failure is not None:
            raise failure
        if text is not None:
            raise Abandoned(f"BestModelCheckpoint: rank {writer} could not write: {text}")


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
