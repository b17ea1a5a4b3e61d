"""The op library, loaded, and its errors."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from gradred import errors
from gradred._native import core
from gradred.tensorflow.interrupt import spare_constructors

__all__ = ["abandon", "as_gradred_error", "native_errors", "ops"]


def _load() -> tuple[Any, ctypes.CDLL]:
    path = os.path.join(os.path.dirname(core.__file__), "libgradred_tf.so")
    module, library = tf.load_op_library(path), ctypes.CDLL(path)
    library.gradred_tf_load_error.restype = ctypes.c_char_p
    reason = library.gradred_tf_load_error()
    if reason is not None:
        raise errors.Unsupported(
            f"gradred's ops cannot be used with TensorFlow {tf.__version__}: {reason.decode()}"
        )
    return module, library


ops, _library = _load()
spare_constructors()


def abandon(key: str, reason: str) -> None:
    """Gives up the next batch of an eager domain; the others get Abandoned with rank and reason."""
    _library.gradred_tf_abandon(key.encode(), reason.encode())


_KIND = re.compile(r"gradred (\w+): ")


def as_gradred_error(error: tf.errors.OpError) -> errors.Error | None:
    """The error of gradred that an op failed with, or None if it was not one of gradred's."""
    text = error.message or ""
    match = _KIND.search(text)
    kind: type[errors.Error] | None = getattr(errors, match[1], None) if match else None
    if match is None or kind is None:
        return None
    # TensorFlow adds where the op was: "... [Op:GradredRunList] name: "
    cause = text[match.end() :].partition(" [Op:")[0]
    return kind(cause.partition("\n\t [[{{node")[0])


@contextmanager
def native_errors() -> Iterator[None]:
    """Turns what ops raise in eager mode into gradred's exceptions."""
    try:
        yield
    except tf.errors.OpError as error:
        ours = as_gradred_error(error)
        if ours is None:
            raise
        raise ours from None


def _not_differentiable(op: Any, *_: Any) -> None:
    name = getattr(op, "name", op.type)  # eager mode's stand-ins have no name
    raise errors.Unsupported(
        f"'{name}' is not differentiable: gradients that an optimizer or a tape reduced cannot "
        "be differentiated again; use gradred.tensorflow.allreduce, which can"
    )


for _name in (
    "GradredSubmit",
    "GradredWait",
    "GradredReduce",
    "GradredRunList",
    "GradredAllToAll",
):
    tf.RegisterGradient(_name)(_not_differentiable)
tf.no_gradient("GradredBegin")
tf.no_gradient("GradredJoin")
tf.no_gradient("GradredPresent")
tf.no_gradient("GradredWorld")
