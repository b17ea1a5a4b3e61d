"""Inputs whose reductions are exact in every dtype, and their NumPy references."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import gradred as gr

DTYPES = [
    *map(
        np.dtype,
        [
            *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
            *("float16", "float32", "float64"),
        ],
    ),
    np.dtype(ml_dtypes.bfloat16),
]
OPS = [gr.Average, gr.Sum, gr.Min, gr.Max, gr.Product]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1025,)]


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Small integers that depend on rank and position: -2 to 2, or 0 to 3 where unsigned."""
    index = np.arange(int(np.prod(shape)))
    if dtype.kind == "b":
        return ((index + rank) % 3 == 0).reshape(shape)
    low, high = (0, 3) if dtype.kind == "u" else (-2, 2)
    numbers = (index * 3 + rank * 5) % (high - low + 1) + low
    return numbers.astype(dtype).reshape(shape)


def reference(op: gr.ReduceOp, shape: tuple[int, ...], dtype: np.dtype, ranks: int) -> np.ndarray:
    """The exact result, rounded once to the dtype; integer averages toward zero."""
    wide = np.int64 if dtype.kind in "iu" else bool if dtype.kind == "b" else np.float64
    stack = np.stack([values(rank, shape, dtype).astype(wide) for rank in range(ranks)])
    if op == gr.Sum:
        result = stack.any(0) if dtype.kind == "b" else stack.sum(0)
    elif op == gr.Average:
        total = stack.sum(0)
        result = np.trunc(total / ranks) if dtype.kind in "iu" else total / ranks
    elif op == gr.Min:
        result = stack.min(0)
    elif op == gr.Max:
        result = stack.max(0)
    else:
        result = stack.all(0) if dtype.kind == "b" else stack.prod(0)
    return np.asarray(result).astype(dtype)
