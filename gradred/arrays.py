"""From the caller's arrays to memory that the engine reads, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradred._native import core
from gradred.errors import InvalidArgument, Unsupported

__all__ = ["DTYPES", "Input", "as_input", "as_list", "check_name", "check_output"]

# Element types that can be reduced, by NumPy's names.
DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
# Those that NumPy has, in the machine's byte order.
_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}
_HOST = (1, 3)  # DLPack: CPU, and host memory pinned for CUDA


@dataclass(frozen=True)
class Input:
    """A C-contiguous array of host memory, and the name of its element type."""

    array: np.ndarray
    dtype: str

    def result(self, array: np.ndarray) -> np.ndarray:
        """The engine's output with the input's element type: bfloat16 comes as its bits."""
        if self.dtype != "bfloat16":
            return array
        if self.array.dtype.name == "bfloat16":
            return array.view(self.array.dtype)
        try:
            import ml_dtypes
        except ImportError:
            return array
        return array.view(ml_dtypes.bfloat16)


def as_input(value: Any, what: str) -> Input:
    """A NumPy array, a DLPack tensor, or anything that NumPy makes an array of.

    Nothing is copied unless the memory is not contiguous or not of the machine's byte order.

    Raises:
        InvalidArgument: an element type without a reduction. ``what`` names the call.
        Unsupported: a tensor that is not in host memory.
    """
    if type(value) is np.ndarray and (known := _NAMES.get(value.dtype)) is not None:
        return Input(_contiguous(value), known)
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        return _from_dlpack(value, what)
    try:
        array = np.asarray(value)
    except ValueError as error:  # of lists that are no rectangle
        raise InvalidArgument(f"{what}: {type(value).__name__} is no array: {error}") from error
    name = array.dtype.name
    if name not in DTYPES:
        raise InvalidArgument(f"{what}: dtype {name}: expected one of {', '.join(DTYPES)}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return Input(_contiguous(array), name)


def as_list(values: Any, what: str) -> list[Any]:
    """The tensors of a grouped call. Raises InvalidArgument for what is no list of them."""
    one = isinstance(values, str | bytes) or hasattr(values, "__array__")
    if one or not isinstance(values, Iterable):
        raise InvalidArgument(f"{what}: expected a list of tensors, got {type(values).__name__}")
    return list(values)


def check_name(name: Any, what: str) -> None:
    """Raises InvalidArgument for what is no name of a call. ``what`` names the operation."""
    if not isinstance(name, str):
        raise InvalidArgument(f"{what}: name={name!r}: expected text, got {type(name).__name__}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what}: name={name!r}: expected text of Unicode: {error}") from None


def check_output(out: Any, value: Input, what: str) -> None:
    """Raises InvalidArgument unless the reduction of ``value`` can be written to ``out``.

    ``what`` names the call.
    """
    where = f"{what}: out"
    if not isinstance(out, np.ndarray):
        raise InvalidArgument(f"{where}: expected a NumPy array, got {type(out).__name__}")
    if out.dtype.name != value.dtype or not out.dtype.isnative:
        raise InvalidArgument(
            f"{where}: expected dtype {value.dtype} in the machine's byte order, got {out.dtype!r}"
        )
    if out.shape != value.array.shape:
        raise InvalidArgument(f"{where}: expected shape {value.array.shape}, got {out.shape}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise InvalidArgument(f"{where}: expected a C-contiguous array that can be written")
    in_place = out.ctypes.data == value.array.ctypes.data
    if not in_place and np.may_share_memory(out, value.array):
        raise InvalidArgument(
            f"{where}: shares some of the input's memory: expected the input itself, or none of it"
        )


def _contiguous(array: np.ndarray) -> np.ndarray:
    # np.ascontiguousarray makes a scalar an array of one element.
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _from_dlpack(value: Any, what: str) -> Input:
    if hasattr(value, "__dlpack_device__"):
        device = int(value.__dlpack_device__()[0])
        if device not in _HOST:
            raise Unsupported(
                f"{what}: a tensor on DLPack device type {device}: copy it to the host first"
            )
    try:
        array, name = core.from_dlpack(value.__dlpack__())
    except (InvalidArgument, Unsupported) as error:
        raise type(error)(f"{what}: {error}") from None
    return Input(_contiguous(array), name)
