"""Optimizers of Keras 3: reduce in ``apply``. See wrapping.py."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gradred.errors import InvalidArgument, Unsupported
from gradred.tensorflow.guard import refuse_reduced
from gradred.tensorflow.reducer import GradientReducer
from gradred.tensorflow.wrapping import (
    become_distributed,
    forget_train_functions,
    guarded_updates,
    hook_loss_scale,
    is_distributed,
    nothing,
)

__all__ = ["fits", "wrap"]

_HOOKED = "_gradred_hooked"


def fits(optimizer: Any) -> bool:
    """Whether it is an optimizer of Keras 3. Raises Unsupported for another backend."""
    keras = _keras()
    if keras is None or not isinstance(optimizer, keras.optimizers.Optimizer):
        return False
    if keras.backend.backend() != "tensorflow":
        raise Unsupported(
            f"DistributedOptimizer: the Keras backend is {keras.backend.backend()}: expected "
            "tensorflow; set KERAS_BACKEND=tensorflow before Keras is imported"
        )
    return True


def wrap(optimizer: Any, reducer: GradientReducer) -> None:
    """Makes the optimizer distributed."""
    keras = _keras()
    assert keras is not None
    hook_loss_scale(keras.optimizers.LossScaleOptimizer, "apply", _apply)
    _hook_jit()
    base = type(optimizer)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        _apply(self, reducer, base.apply, grads, trainable_variables)

    become_distributed(optimizer, reducer, {"apply": apply, **guarded_updates(base, reducer)})
    if optimizer.built:
        forget_train_functions(keras.Model, optimizer)


def _apply(
    optimizer: Any,
    reducer: GradientReducer,
    original: Callable[..., Any],
    grads: Any,
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    grads = list(grads)
    if not reducer.active or not grads:
        original(optimizer, grads, trainable_variables)
        return
    if trainable_variables is None:
        trainable_variables = optimizer._trainable_variables
    variables = list(trainable_variables)
    if len(grads) != len(variables):
        raise InvalidArgument(
            f"{type(optimizer).__name__}.apply: {len(grads)} gradients for {len(variables)} "
            "variables"
        )
    refuse_reduced(grads, variables)
    if reducer.passes > 1 and not optimizer.built:
        with _keras().name_scope(optimizer.name):  # not in a branch of the graph
            optimizer.build(variables)

    def update(reduced: list[Any]) -> Any:
        original(optimizer, reduced, variables)
        return nothing()

    reducer.step(grads, variables, update, nothing)


def _keras() -> Any:
    """Keras 3 if the program has imported it: else its optimizer cannot be one of Keras 3."""
    keras = sys.modules.get("keras")
    version = getattr(keras, "__version__", "0")
    return keras if keras is not None and int(version.split(".")[0]) >= 3 else None


def _hook_jit() -> None:
    """Keras turns XLA on by itself where there is a GPU, and XLA cannot run a reduction."""
    trainer: Any = sys.modules.get("keras.src.trainers.trainer")
    original = getattr(trainer, "model_supports_jit", None)
    if original is None or hasattr(original, _HOOKED):
        return

    @functools.wraps(original)
    def model_supports_jit(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        return not is_distributed(optimizer) and original(model)

    setattr(model_supports_jit, _HOOKED, True)
    trainer.model_supports_jit = model_supports_jit
