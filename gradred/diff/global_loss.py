"""The loss of all ranks as one function of replicated parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.psum import psum, replicate
from gradred.tensorflow.graph import plain_python

__all__ = ["global_loss"]


@plain_python
def global_loss(loss: Callable[..., tf.Tensor], context: Context, *parameters: Any) -> tf.Tensor:
    """The sum over ranks of ``loss(*parameters)``, replicated. Collective; differentiable.

    loss: this rank's part, from its own data; may communicate in the context. parameters: tensors,
    variables, or structures of them, equal on all ranks, handed over as tensors. The gradient by
    them is that of the sum, exactly and equal on all ranks.
    """
    context.begin(parameters)
    used = tf.nest.map_structure(lambda p: replicate(p, context), parameters)
    return context.end(psum(loss(*used), context))
