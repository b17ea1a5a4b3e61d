"""Guard: what is raised between operations, told to those who wait in the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from gradred._native import core
from gradred.diff.context import Context
from gradred.diff.node import contexts as all_contexts
from gradred.diff.node import told
from gradred.errors import Error
from gradred.uncaught import as_utf8

__all__ = ["as_text", "guard"]


def as_text(error: Exception) -> str:
    """The kind and the message of an exception, without the stack that TensorFlow puts into it."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        text = error.message.partition("\n\t [[")[0].rpartition("\n\n")[2]
    return as_utf8(f"{type(error).__name__}: {text}")


@contextlib.contextmanager
def guard(*contexts: Context, what: str = "guarded code") -> Iterator[None]:
    """Tells the other ranks of an exception within, so that they do not wait for this one. Local.

    Around code with operations of gradred.diff whose exceptions are caught further out: where
    nobody catches them the process ends, and the others hear of that. The exception ends the
    contexts: operations of the other ranks fail with ``what``, this rank and the text of the
    exception, which is raised here. What an operation of gradred.diff has raised is known to the
    members of its context, and does not end that one; with ``raise ... from`` another may take its
    place.

    contexts: that the code uses; none: all of this process. what: in the other ranks' errors.
    """
    try:
        yield
    except Exception as error:
        known, text = told(error), as_text(error)
        for context in contexts or tuple(all_contexts.values()):
            if context.included and context.size > 1 and context.id not in known:
                with contextlib.suppress(Error):  # it is closed, which the others know
                    core.diff_refuse(context.id, what, text, False)
        raise
