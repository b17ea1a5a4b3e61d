"""Dtypes on the wire, by the names that Horovod's users know."""

from __future__ import annotations

from typing import Any

from gradred.errors import InvalidArgument, Unsupported

__all__ = ["Compression", "Compressor", "wire_of"]


class Compressor:
    """A dtype that float32 and float64 tensors travel in. Others travel as they are.

    The native core casts when it packs and unpacks, so nothing is stored twice; what overflows is
    counted in ``gradred.metrics().saturated``.
    """

    def __init__(self, wire: str) -> None:
        self.wire = wire

    def wire_of(self, dtype: str) -> str:
        """The wire dtype of tensors of ``dtype``, both by NumPy's names."""
        if self.wire != "none" and dtype in ("float32", "float64"):
            return self.wire
        return dtype

    def __repr__(self) -> str:
        return f"Compressor({self.wire!r})"


class Compression:
    """The wire dtypes to choose from."""

    none = Compressor("none")
    fp16 = Compressor("float16")
    bf16 = Compressor("bfloat16")


_NAMES = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "float16": Compression.fp16,
    "bf16": Compression.bf16,
    "bfloat16": Compression.bf16,
}


def wire_of(compression: Any, default: str, what: str) -> Compressor:
    """The Compressor that a call's ``compression`` argument means.

    compression: a member of Compression, its name, or None for ``default``, a setting's value. what
    names the call in errors. Raises InvalidArgument, and Unsupported for a compressor of one's own.
    """
    chosen = default if compression is None else compression
    if isinstance(chosen, Compressor):
        return chosen
    if isinstance(chosen, str) and chosen in _NAMES:
        return _NAMES[chosen]
    if hasattr(chosen, "compress"):
        raise Unsupported(
            f"{what}: compression={compression!r}: compressors of one's own are not supported: "
            "expected Compression.none, Compression.fp16 or Compression.bf16"
        )
    raise InvalidArgument(
        f"{what}: compression={compression!r}: expected Compression.none, Compression.fp16 or "
        "Compression.bf16"
    )
