"""Optimizers of tf.keras 2, also legacy ones: reduce in ``apply_gradients``. See wrapping.py."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from gradred.tensorflow.guard import refuse_reduced, require_reduced
from gradred.tensorflow.reducer import GradientReducer
from gradred.tensorflow.wrapping import (
    after,
    become_distributed,
    forget_train_functions,
    guarded_updates,
    hook_loss_scale,
    nothing,
)

__all__ = ["fits", "wrap"]


def fits(optimizer: Any) -> bool:
    """Whether it is one of Keras 2: of TensorFlow up to 2.15, or of the package tf_keras."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is not optimizer:
        return fits(inner)
    kind = type(optimizer)
    legacy = hasattr(kind, "_resource_apply_dense") and hasattr(kind, "_aggregate_gradients")
    return legacy or (hasattr(kind, "update_step") and hasattr(kind, "aggregate_gradients"))


def wrap(optimizer: Any, reducer: GradientReducer) -> None:
    """Makes the optimizer distributed."""
    package = _package(type(getattr(optimizer, "inner_optimizer", optimizer)))
    scales = importlib.import_module(f"{package}.mixed_precision.loss_scale_optimizer")
    for kind in ("LossScaleOptimizer", "LossScaleOptimizerV3"):
        hook_loss_scale(getattr(scales, kind), "apply_gradients", _apply)
    base = type(optimizer)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return _apply(self, reducer, base.apply_gradients, grads_and_vars, *args, **kwargs)

    methods = {"apply_gradients": apply_gradients}
    if hasattr(base, "update_step"):  # no legacy one
        methods.update(guarded_updates(base, reducer))
    become_distributed(optimizer, reducer, methods)
    models = importlib.import_module(f"{package}.engine.training")
    forget_train_functions(models.Model, optimizer)


def _package(kind: type) -> str:
    """Where the Keras that a class belongs to has its sources: "keras.src", "tf_keras.src"."""
    modules = (k.__module__ for k in kind.__mro__ if ".optimizers." in k.__module__)
    return [module.partition(".optimizers.")[0] for module in modules][-1]


def _apply(
    optimizer: Any,
    reducer: GradientReducer,
    original: Callable[..., Any],
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    pairs = list(grads_and_vars)
    if not reducer.active or not pairs:
        return original(optimizer, pairs, *args, **kwargs)
    gradients, variables = zip(*pairs, strict=True)
    skipped = _skips_aggregation(original, optimizer, pairs, *args, **kwargs)
    if skipped:
        require_reduced(gradients, variables, reducer.local.keys(), skipped)
        with reducer.applying():
            return original(optimizer, pairs, *args, **kwargs)
    refuse_reduced(gradients, variables)
    several = reducer.passes > 1
    if several:
        _build(optimizer, variables)

    def update(reduced: list[Any]) -> Any:
        reduced_pairs = list(zip(reduced, variables, strict=True))
        done = original(optimizer, reduced_pairs, *args, **kwargs)
        return after(done) if several else done

    done = reducer.step(gradients, variables, update, nothing)
    if several:
        sessions = not tf.compat.v1.executing_eagerly_outside_functions()
        return done.op if sessions else optimizer.iterations
    return done


def _build(optimizer: Any, variables: Any) -> None:
    """Makes the optimizer's variables, which cannot be made in a branch of a graph."""
    with tf.init_scope():
        if hasattr(optimizer, "_create_all_weights"):
            optimizer._create_all_weights(variables)
        else:
            optimizer.build(variables)


def _skips_aggregation(
    original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
) -> str | None:
    """The argument by which the caller says that the gradients are aggregated already."""
    given = inspect.signature(original).bind(optimizer, *args, **kwargs).arguments
    given = {**given, **given.get("kwargs", {})}
    if given.get("skip_gradients_aggregation", False):
        return "skip_gradients_aggregation=True"
    if not given.get("experimental_aggregate_gradients", True):
        return "experimental_aggregate_gradients=False"
    return None
