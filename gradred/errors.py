"""Exceptions of gradred: the kinds of the native core, under the same names.

Entry errors (InvalidArgument, Mismatch, Abandoned, Unsupported) fail the entries they concern alike
on all ranks and leave gradred usable. Engine errors (PeerLost, TransportError, Timeout, Internal)
end it on every rank: the process should end as well.
"""
# ruff: noqa: N818 - the names are those of the native core

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "Abandoned",
    "Error",
    "Internal",
    "InvalidArgument",
    "Mismatch",
    "NotInitialized",
    "PeerLost",
    "Timeout",
    "TransportError",
    "Unsupported",
]


class Error(RuntimeError):
    """Base of all errors of gradred; ``kind`` is the name that the native core uses."""

    kind: ClassVar[str] = "Error"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" not in cls.__dict__:
            cls.kind = cls.__name__


class InvalidArgument(Error, ValueError):
    """An argument, or a setting, is outside of what is accepted."""


class NotInitialized(Error, ValueError):
    """There is no engine: before ``init()``, after ``shutdown()``, or in a forked child."""


class Mismatch(Error):
    """Ranks disagree: on a shape, dtype, operation, name or setting. Reads alike on all of them."""


class Abandoned(Error):
    """Another rank gave up: an operation failed there, it raised, or it shut down."""


class Unsupported(Error):
    """Not available for this dtype, device, library or system."""


class Timeout(Error, TimeoutError):
    """A time limit passed: of opening, of a stall, or of ``Handle.wait``."""


class PeerLost(Error, ConnectionError):
    """The process of another rank ended without saying good-bye."""


class TransportError(Error, ConnectionError):
    """Agreed work does not move, or what moved makes no sense."""


class Internal(Error):
    """A fault in gradred itself."""
