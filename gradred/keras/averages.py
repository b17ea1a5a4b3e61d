"""Metrics of an epoch over the samples of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import gradred
import tensorflow as tf
from gradred.config import holders, name_ranks
from gradred.errors import Mismatch
from gradred.process_sets import ProcessSet, global_process_set

__all__ = ["AveragingCallback"]


class AveragingCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Comes first among the bases of callbacks that read metrics of all ranks."""

    def __init__(
        self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.process_set = process_set
        self._trained: dict[str, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trained = None
        super().on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        # The evaluation in fit is about to reset what the epoch has counted.
        if self._trained is None:
            self._trained = _counts(self.model)
        super().on_test_begin(logs)

    def averages(self, logs: Mapping[str, Any] | None, what: str) -> dict[str, float]:
        """Averages of all ranks' numbers, by name. Collective over the process set.

        logs: at the end of an epoch, or of a batch; names may be missing on some ranks. what: the
        same on all ranks. Each rank counts by its samples, as the metric of that name counts them,
        or else the loss; where nothing is counted, ranks count alike. Returns: the same numbers on
        all ranks.

        Raises: Mismatch: callbacks in front of this one have given ranks different learning rates,
        or have stopped some of them.
        """
        now = _counts(self.model)
        trained = now if self._trained is None else self._trained
        mine = {}
        for name, value in _numbers(logs):
            counts = now if name.startswith("val_") else trained
            count = counts.get(name.removeprefix("val_"), counts.get("loss", 1.0))
            mine[name] = (value, count)
        both = gradred.allgather_object(
            (mine, _decided(self.model)), name=what, process_set=self.process_set
        )
        everyone, decided = zip(*both, strict=True)
        self._check_alike(decided, what)
        names = sorted({name for theirs in everyone for name in theirs})
        return {name: _average([t[name] for t in everyone if name in t]) for name in names}

    def _check_alike(self, decided: Sequence[dict[str, str]], what: str) -> None:
        for name in decided[0]:
            held_by = holders([theirs[name] for theirs in decided])
            if len(held_by) > 1:
                values = ", ".join(
                    f"{value} on {name_ranks([self.process_set.ranks[i] for i in held])}"
                    for value, held in held_by.items()
                )
                raise Mismatch(
                    f"{what}: process set {self.process_set.process_set_id}: the {name} is "
                    f"{values}; callbacks that decide by metrics (ReduceLROnPlateau, "
                    "EarlyStopping) come behind MetricAverageCallback"
                )


def _decided(model: Any) -> dict[str, str]:
    """What callbacks of one rank have decided, and all need alike."""
    rate = getattr(getattr(model, "optimizer", None), "learning_rate", None)
    if callable(rate):  # a schedule of Keras 2, which no callback decides; its text has an address
        rate = "of a schedule"
    elif rate is not None:
        rate = float(np.asarray(tf.convert_to_tensor(rate)))
    return {
        "learning rate": f"{rate}",
        "end of training": "now" if getattr(model, "stop_training", False) else "later",
    }


def _average(parts: list[tuple[float, float]]) -> float:
    """Of (value, weight); a value of no weight may be anything."""
    weighted = [(value, weight) for value, weight in parts if weight > 0]
    weighted = weighted or [(value, 1.0) for value, _ in parts]
    if len({value for value, _ in weighted}) == 1:
        return weighted[0][0]  # averaged before: not rounded again
    total = math.fsum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total


def _numbers(logs: Mapping[str, Any] | None) -> Iterator[tuple[str, float]]:
    for name, value in (logs or {}).items():
        if np.ndim(value) == 0:
            try:
                yield name, float(value)
            except (TypeError, ValueError):
                continue  # a text, or an object of the user's


def _counts(model: Any) -> dict[str, float]:
    """How many samples, or weights of samples, the model's means hold, by name."""
    found: dict[str, list[float]] = {}
    waiting = list(model.metrics)
    while waiting:
        metric = waiting.pop()
        waiting.extend(getattr(metric, "metrics", ()))
        count = getattr(metric, "count", None)
        if count is not None and not callable(count):
            found.setdefault(metric.name, []).append(float(tf.convert_to_tensor(count)))
    # Of several outputs' metrics, names in the logs do not tell which is which.
    return {name: counts[0] for name, counts in found.items() if len(counts) == 1}
