"""What the adapters of all families of optimizers share.

An adapter is a module with ``fits(optimizer)`` and ``wrap(optimizer, reducer)``, which changes the
optimizer's class to a subclass of it in place: that looks like its base, and gives gradients to
the reducer where it is asked to apply them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from gradred.errors import InvalidArgument
from gradred.tensorflow.graph import plain_python
from gradred.tensorflow.reducer import GradientReducer

__all__ = [
    "after",
    "become_distributed",
    "forget_train_functions",
    "guarded_updates",
    "hook_loss_scale",
    "is_distributed",
    "nothing",
    "reducer_of",
]

_ATTRIBUTE = "_gradred_reducer"


def reducer_of(optimizer: Any) -> GradientReducer | None:
    """The reducer of a distributed optimizer."""
    return getattr(optimizer, _ATTRIBUTE, None)


def is_distributed(optimizer: Any) -> bool:
    """Also of one around a distributed optimizer, as a LossScaleOptimizer may be."""
    return any(hasattr(type(o), _ATTRIBUTE) for o in _all(optimizer))


def _all(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    inside = [getattr(optimizer, name, None) for name in ("inner_optimizer", "_optimizer")]
    several = getattr(optimizer, "optimizers", None)
    for inner in inside + (several if isinstance(several, list) else []):
        if inner is not None and inner is not optimizer and hasattr(inner, "__dict__"):
            yield from _all(inner)


def become_distributed(
    optimizer: Any, reducer: GradientReducer, methods: dict[str, Callable[..., Any]]
) -> None:
    """Gives the optimizer's class these methods and the reducer."""
    base = type(optimizer)

    def register_local_var(self: Any, var: Any) -> None:
        """The gradient of ``var`` stays on its rank. Before the first step. Local."""
        reducer.local.add(var)

    # Under the base's names, so that what is saved names a class of Keras.
    namespace = {
        **{name: plain_python(method) for name, method in methods.items()},
        "register_local_var": register_local_var,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        # Of the class, which copies and what from_config() makes have too: they reduce as well.
        _ATTRIBUTE: reducer,
    }
    optimizer.__class__ = type(base.__name__, (base,), namespace)
    if hasattr(optimizer, "_track_trackable"):
        # For tf.train.Checkpoint; not among the optimizer's variables, which ranks have alike.
        reducer.on_new = lambda sums, number: optimizer._track_trackable(
            sums, f"gradred_accumulation_{number}"
        )


def hook_loss_scale(loss_scale: Any, method: str, reduced: Callable[..., Any]) -> None:
    """Makes a class of LossScaleOptimizer reduce for a distributed optimizer in it; once.

    method: of the class, the one that applies. reduced: called as (self, reducer, original,
    *arguments) in its place, if the optimizer inside is distributed.
    """
    # Note [Loss scaling]
    # LossScaleOptimizer looks whether its gradients are finite, and calls the inner optimizer only
    # if they are. With a distributed optimizer inside, a rank with a non-finite gradient would skip
    # its reduction and leave the others waiting, and ranks would skip different steps. compile()
    # under mixed_float16 builds just that around a distributed optimizer. So the reduction moves in
    # front of the check: all ranks check the same reduced gradients.
    original = getattr(loss_scale, method)
    if hasattr(original, _ATTRIBUTE):
        return

    @plain_python
    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        reducer = reducer_of(self.inner_optimizer)
        if reducer is None:
            return original(self, *args, **kwargs)
        return reduced(self, reducer, original, *args, **kwargs)

    setattr(apply, _ATTRIBUTE, True)
    setattr(loss_scale, method, apply)


def guarded_updates(base: Any, reducer: GradientReducer) -> dict[str, Callable[..., Any]]:
    """The methods of an optimizer of Keras that change one variable, guarded.

    A gradient that nobody has reduced is an InvalidArgument. A variable for which no rank has a
    gradient is left alone; in a graph, where this is known when it runs alone, by a condition.
    """

    def update_step(self: Any, gradient: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
        if reducer.active:
            kind = type(self).__name__
            raise InvalidArgument(
                f"{kind}.update_step was called with a gradient that nobody has reduced: call "
                f"apply_gradients of the distributed {kind}"
            )
        update = functools.partial(base.update_step, self, gradient, variable, *args, **kwargs)
        return _unless_missing(reducer, variable, update)

    def apply_weight_decay(self: Any, variables: Any) -> None:
        missing = [v for v in variables if reducer.missing(v) is not None]
        kept = {id(v) for v in missing}
        base._apply_weight_decay(self, [v for v in variables if id(v) not in kept])
        for variable in missing if self.weight_decay else ():
            decay = functools.partial(base._apply_weight_decay, self, [variable])
            _unless_missing(reducer, variable, decay)

    return {"update_step": update_step, "_apply_weight_decay": apply_weight_decay}


def _unless_missing(reducer: GradientReducer, variable: Any, update: Callable[[], Any]) -> Any:
    present = reducer.missing(variable)
    if present is None:
        return update()
    return tf.cond(present > 0, lambda: after(update()), nothing)


def forget_train_functions(model_class: Any, optimizer: Any) -> None:
    """Models that were trained with this optimizer hold a traced step without the reduction."""
    for thing in gc.get_objects():
        if issubclass(type(thing), model_class) and getattr(thing, "optimizer", None) is optimizer:
            thing.train_function = None


def nothing() -> Any:
    """What an adapter's ``skip`` returns where a pass is not followed by an update."""
    return tf.constant(0, tf.int64)


def after(done: Any) -> Any:
    """As ``nothing``, in a graph not before an operation is done."""
    graph = not tf.executing_eagerly() and isinstance(done, tf.Operation | tf.Tensor)
    with tf.control_dependencies([done] if graph else []):
        return nothing()
