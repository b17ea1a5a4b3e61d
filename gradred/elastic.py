"""Horovod's names of elastic training, which raise Unsupported: jobs keep their ranks."""

from __future__ import annotations

from typing import Any, NoReturn

from gradred.errors import Unsupported

__all__ = ["refuse", "run"]


def refuse(name: str) -> NoReturn:
    """Raises Unsupported."""
    raise Unsupported(
        f"elastic.{name}: elastic training is not supported: the ranks of a job are fixed; write "
        "checkpoints, and start the job again when a rank is lost"
    )


def run(func: Any) -> NoReturn:
    """Raises Unsupported."""
    refuse("run")


class _Refused:
    def __init__(self, *_: Any, **__: Any) -> None:
        refuse(type(self).__name__)


class State(_Refused):
    """Raises Unsupported."""


class ObjectState(_Refused):
    """Raises Unsupported."""
