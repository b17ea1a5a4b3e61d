"""Reductions, with Horovod's numbers."""

from __future__ import annotations

import enum
import math
import numbers

from gradred.errors import InvalidArgument, Unsupported

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "checked_factors",
    "native_name",
]


class ReduceOp(enum.IntEnum):
    """How the ranks' values of one element are put together."""

    Average = 0
    Sum = 1
    Adasum = 2  # a number of Horovod's; not supported
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp


def native_name(op: ReduceOp | int, what: str) -> str:
    """The native core's name of a reduction. ``what`` names the call in errors."""
    try:
        op = ReduceOp(op)
    except ValueError:
        known = ", ".join(f"{o.name} ({o.value})" for o in ReduceOp)
        raise InvalidArgument(f"{what}: op={op!r}: expected one of {known}") from None
    if op is ReduceOp.Adasum:
        raise Unsupported(f"{what}: Adasum is not supported; use Average or Sum")
    return op.name.lower()


def checked_factors(prescale: float, postscale: float, what: str) -> tuple[float, float]:
    """Both as they will be used. Raises InvalidArgument, naming the call ``what``."""
    for label, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        number = type(factor) is float or isinstance(factor, numbers.Real)
        if not number or not math.isfinite(factor):
            raise InvalidArgument(f"{what}: {label}={factor!r}: expected a finite number")
    return float(prescale), float(postscale)
