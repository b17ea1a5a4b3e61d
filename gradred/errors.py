"""Exceptions of gradred: the kinds of the native core, under the same names.

Entry errors (InvalidArgument, Mismatch, Abandoned, Unsupported) fail the calls they concern and
leave gradred usable. Mismatch and Abandoned come alike to all ranks. InvalidArgument and
Unsupported are mostly found before anything is sent, on the rank that calls; the others then wait
for that rank's next call of the name, or for its end.

Engine errors (PeerLost, TransportError, Timeout, Internal) end gradred on every rank: the process
should end as well. So does an Unsupported that comes while a group runs, for lack of shared memory.
An Internal of one TensorFlow operation, as in a graph that another process traced, leaves gradred
usable.
"""
# ruff: noqa: N818 - the names are those of the native core

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

__all__ = [
    "Abandoned",
    "Error",
    "HorovodInternalError",
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

    if not TYPE_CHECKING:
        # TensorFlow's AutoGraph replaces exceptions that Exception itself does not initialise.
        __init__ = Exception.__init__

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" not in cls.__dict__:
            cls.kind = cls.__name__


class InvalidArgument(Error, ValueError):
    """An argument, or a setting, is outside of what is accepted."""


class NotInitialized(Error, ValueError):
    """There is no engine: before ``init()``, after ``shutdown()``, or in a forked child."""


class HorovodInternalError(Error):
    """Horovod's name for a collective that failed, and not by this rank's own call.

    The base of Abandoned, after which gradred goes on, and of the engine errors, after which the
    job has to be started again.
    """

    kind: ClassVar[str] = "Error"


class Mismatch(Error):
    """Ranks disagree: on a shape, dtype, operation, name or setting. Reads alike on all of them."""


class Abandoned(HorovodInternalError):
    """Another rank gave up: an operation failed there, it raised, or it shut down."""


class Unsupported(Error):
    """Not available for this dtype, device, library or system. Ends gradred if a group runs."""


class Timeout(HorovodInternalError, TimeoutError):
    """A time limit passed: of ``init()``, or of a stall where one is set."""


class PeerLost(HorovodInternalError, ConnectionError):
    """The process of another rank ended without saying good-bye."""


class TransportError(HorovodInternalError, ConnectionError):
    """Agreed work does not move, or what moved makes no sense."""


class Internal(HorovodInternalError):
    """A fault in gradred itself, or an operation whose domain this process does not know."""
