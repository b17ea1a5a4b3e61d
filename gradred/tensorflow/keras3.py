"""Optimizers of Keras 3. The interface is that of keras2.py: fits, is_distributed, wrap."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Sequence
from typing import Any

from gradred.errors import InvalidArgument, Unsupported
from gradred.tensorflow.graph import plain_python
from gradred.tensorflow.reducer import GradientReducer
from gradred.tensorflow.tape import refuse_reduced

__all__ = ["fits", "is_distributed", "wrap"]

_ATTRIBUTE = "_gradred_reducer"


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


def is_distributed(optimizer: Any) -> bool:
    """Also of an optimizer inside of a LossScaleOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return _reducer_of(optimizer) is not None or _reducer_of(inner) is not None


def wrap(optimizer: Any, reducer: GradientReducer) -> Any:
    """Changes the optimizer's class to a subclass that looks like it and reduces in ``apply``."""
    keras = _keras()
    assert keras is not None
    _install_hooks(keras)
    base = type(optimizer)

    @plain_python
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        if reducer.active and grads:
            grads = _reduce(self, reducer, grads, trainable_variables)
        return base.apply(self, grads, trainable_variables)

    # Under the base's names, so that what is saved names a class of Keras.
    namespace = {
        "apply": apply,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    optimizer.__class__ = type(base.__name__, (base,), namespace)
    # Past Keras' tracking of attributes: this is no state of the optimizer.
    object.__setattr__(optimizer, _ATTRIBUTE, reducer)
    if optimizer.built:
        _forget_train_functions(keras, optimizer)
    return optimizer


def _reduce(
    optimizer: Any, reducer: GradientReducer, grads: list[Any], variables: Sequence[Any] | None
) -> list[Any]:
    if variables is None:
        variables = optimizer._trainable_variables
    variables = list(variables)
    if len(grads) != len(variables):
        raise InvalidArgument(
            f"{type(optimizer).__name__}.apply: {len(grads)} gradients for {len(variables)} "
            "variables"
        )
    refuse_reduced(grads, variables)
    return reducer.reduce(grads, variables)


def _reducer_of(optimizer: Any) -> GradientReducer | None:
    return getattr(optimizer, _ATTRIBUTE, None)


def _keras() -> Any:
    """Keras 3 if the program has imported it: else its optimizer cannot be one of Keras 3."""
    keras = sys.modules.get("keras")
    version = getattr(keras, "__version__", "0")
    return keras if keras is not None and int(version.split(".")[0]) >= 3 else None


def _install_hooks(keras: Any) -> None:
    """Two places of Keras that decide without asking the optimizer; once a process."""
    loss_scale = keras.optimizers.LossScaleOptimizer
    if hasattr(loss_scale.apply, _ATTRIBUTE):
        return
    _hook_loss_scale(loss_scale)
    trainer = sys.modules.get("keras.src.trainers.trainer")
    if trainer is not None and hasattr(trainer, "model_supports_jit"):
        _hook_jit(trainer)


# Note [Loss scaling]
# LossScaleOptimizer looks whether its gradients are finite, and calls the inner optimizer only if
# they are. With a distributed optimizer inside, a rank with a non-finite gradient would skip its
# reduction and leave the others waiting, and ranks would skip different steps. compile() under
# mixed_float16 builds just that around a distributed optimizer. So the reduction moves in front of
# the check: all ranks check the same reduced gradients.
def _hook_loss_scale(loss_scale: Any) -> None:
    original = loss_scale.apply

    @plain_python
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        reducer = _reducer_of(self.inner_optimizer)
        if reducer is None or not reducer.active or not grads:
            return original(self, grads, trainable_variables)
        grads = _reduce(self, reducer, grads, trainable_variables)
        with reducer.paused():
            return original(self, grads, trainable_variables)

    setattr(apply, _ATTRIBUTE, True)
    loss_scale.apply = apply


def _hook_jit(trainer: Any) -> None:
    """Keras turns XLA on by itself where there is a GPU, and XLA cannot run a reduction."""
    original = trainer.model_supports_jit

    @functools.wraps(original)
    def model_supports_jit(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        return not is_distributed(optimizer) and original(model)

    trainer.model_supports_jit = model_supports_jit


def _forget_train_functions(keras: Any, optimizer: Any) -> None:
    """Models that were trained with this optimizer hold a traced step without the reduction."""
    for thing in gc.get_objects():
        if issubclass(type(thing), keras.Model) and getattr(thing, "optimizer", None) is optimizer:
            thing.train_function = None
