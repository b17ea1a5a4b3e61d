"""Optimizers of tf.keras 2. The interface is that of keras3.py: fits, is_distributed, wrap."""

from __future__ import annotations

from typing import Any

from gradred.errors import Unsupported
from gradred.tensorflow.graph import plain_python
from gradred.tensorflow.reducer import GradientReducer
from gradred.tensorflow.tape import refuse_reduced

__all__ = ["fits", "is_distributed", "wrap"]

_ATTRIBUTE = "_gradred_reducer"


def fits(optimizer: Any) -> bool:
    """Whether it is one of Keras 2. Raises Unsupported for one of its legacy optimizers."""
    if _inner(optimizer) is not optimizer:
        return fits(_inner(optimizer))
    kind = type(optimizer)
    if hasattr(kind, "_aggregate_gradients") and hasattr(kind, "_resource_apply_dense"):
        raise Unsupported(
            f"DistributedOptimizer: {kind.__name__} is a legacy optimizer of Keras: use "
            f"tf.keras.optimizers.{kind.__name__}"
        )
    return hasattr(kind, "aggregate_gradients") and hasattr(kind, "update_step")


def is_distributed(optimizer: Any) -> bool:
    """Also of an optimizer inside of a LossScaleOptimizer."""
    return hasattr(_inner(optimizer), _ATTRIBUTE)


def wrap(optimizer: Any, reducer: GradientReducer) -> Any:
    """Changes the optimizer's class to a subclass that reduces in ``aggregate_gradients``.

    LossScaleOptimizer calls that of its inner optimizer before it looks whether gradients are
    finite, so the inner one is changed, and all orders of wrapping are alike.
    """
    inner = _inner(optimizer)
    base = type(inner)
    built_for: list[Any] = []

    def build(self: Any, var_list: Any) -> Any:
        built_for[:] = list(var_list)
        return base.build(self, var_list)

    @plain_python
    def aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            # It has dropped the variables without a gradient; other ranks may have one for them.
            given = {id(variable): gradient for gradient, variable in pairs}
            if given.keys() <= {id(variable) for variable in built_for}:
                pairs = [(given.get(id(variable)), variable) for variable in built_for]
        if pairs:
            gradients, variables = zip(*pairs, strict=True)
            refuse_reduced(gradients, variables)
            pairs = list(zip(reducer.reduce(gradients, variables), variables, strict=True))
        return base.aggregate_gradients(self, pairs)

    # Under the base's names, so that what is saved names a class of Keras.
    namespace = {
        "build": build,
        "aggregate_gradients": aggregate_gradients,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    inner.__class__ = type(base.__name__, (base,), namespace)
    # Past Keras' tracking of attributes: this is no state of the optimizer.
    object.__setattr__(inner, _ATTRIBUTE, reducer)
    return optimizer


def _inner(optimizer: Any) -> Any:
    """The optimizer in a LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)
