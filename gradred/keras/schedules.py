"""Learning rates that change during ``fit``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tensorflow as tf
from gradred import basics
from gradred.errors import InvalidArgument

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


# Of optimizers whose rate is 0 now.
_rates_before_zero: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``. Local.

    multiplier: a number, or a function of the epoch, from 0. start_epoch, end_epoch: it acts in
    epochs from the first, before the second; None: to the end. staircase: at the beginning of
    each epoch; else before each batch, with a fraction of steps_per_epoch added to the epoch.
    steps_per_epoch: None: what ``fit`` knows. momentum_correction: Note [Momentum correction].

    The learning rate is added to the epoch's logs as "lr".

    Raises: InvalidArgument: no initial_lr, an optimizer with a schedule of its own, steps_per_epoch
    not given and not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: float = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidArgument(f"{type(self).__name__}: initial_lr=None: expected a number")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        _learning_rate(self.model.optimizer)
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise InvalidArgument(
                f"{type(self).__name__}: steps_per_epoch=None: expected a number, as the data have "
                "no known length"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._set(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = _learning_rate(optimizer) or _rates_before_zero.get(optimizer, 0.0)
        optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)
        after = _learning_rate(optimizer)
        if after == 0.0:
            _rates_before_zero[optimizer] = before
        elif self.momentum_correction and before not in (0.0, after):
            _rescale_momentum(optimizer, after / before)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr``, batch by batch.

    initial_lr: for all ranks' samples together. warmup_epochs: how long it takes. verbose: print a
    line at the end, if it is not 0. Others, and errors: see LearningRateScheduleCallback.

    Method: Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            # 1 in the last batch
            done = min((epoch + 1.0 / self.steps_per_epoch) / warmup_epochs, 1.0)
            size = basics.size()
            return (1.0 + done * (size - 1)) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch + 1 == math.ceil(self.end_epoch):
            rate = _learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: the learning rate has reached {rate:g}")


# Note [Momentum correction]
# SGD and RMSprop keep v = m v + lr * g: past gradients with the rates of their time. When the rate
# changes, the formula that analyses assume, u = m u + g with a step of lr * u, needs v times
# new / old once. So v itself is multiplied. (A momentum that is larger for one step has the same
# effect without Nesterov's, but Keras 3 has traced the momentum as a constant.) A rate of 0 leaves
# v as it is, since no later factor would bring it back: weights go on by v, which fades with m, and
# the next rate is compared with the last one before 0.
# Source: arXiv:1706.02677, section 3, remark 2.
def _rescale_momentum(optimizer: Any, factor: float) -> None:
    for slot in _momentum_slots(getattr(optimizer, "inner_optimizer", optimizer)):
        slot.assign(slot * factor)


def _momentum_slots(optimizer: Any) -> Iterator[Any]:
    """The variables in which an optimizer keeps gradients times rates, as far as they exist."""
    optimizers = tf.keras.optimizers
    if isinstance(optimizer, optimizers.SGD):
        yield from getattr(optimizer, "momentums", ())
    elif isinstance(optimizer, optimizers.RMSprop):
        yield from getattr(optimizer, "_momentums", ())
    else:  # Keras 2's legacy SGD and RMSprop; others have no slots of that name
        for slots in getattr(optimizer, "_slots", {}).values():
            if "momentum" in slots:
                yield slots["momentum"]


def _learning_rate(optimizer: Any) -> float:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    schedule = getattr(inner, "_learning_rate", inner.learning_rate)
    if isinstance(schedule, tf.keras.optimizers.schedules.LearningRateSchedule):
        raise InvalidArgument(
            f"the learning rate of {type(inner).__name__} is a {type(schedule).__name__}: expected "
            "a number where callbacks set it"
        )
    return float(np.asarray(tf.convert_to_tensor(optimizer.learning_rate)))
