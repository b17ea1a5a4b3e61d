"""Builds and opens the native parts of the benchmarks."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["Region", "build", "copy", "hand_over", "library", "triad"]

_SOURCES = Path(__file__).parents[1] / "native"
_BUILD = Path(__file__).parents[2] / "build" / "benchmarks"


def build(source: str, options: Sequence[str] = (), suffix: str = "") -> Path:
    """The shared library of a source file in benchmarks/native, built if it is missing or old."""
    path = _SOURCES / source
    library = _BUILD / f"lib{path.stem}{suffix}.so"
    if library.exists() and library.stat().st_mtime >= path.stat().st_mtime:
        return library
    _BUILD.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}")
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-Wall", "-Wextra"]
    command = [compiler, *flags, str(path), "-o", str(part), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    os.replace(part, library)
    return library


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build("bench.cpp")))
    lib.bench_open.restype = ctypes.c_void_p
    lib.bench_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
    lib.bench_close.argtypes = lib.bench_barrier.argtypes = [ctypes.c_void_p]
    lib.bench_copy_loop.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
    ]
    lib.bench_hand_over.argtypes = [ctypes.c_int]
    lib.bench_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    pointer = ctypes.c_void_p
    lib.bench_triad.argtypes = [pointer, pointer, pointer, ctypes.c_double, ctypes.c_size_t]
    return lib


def triad(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """``a = b + 3 c``, float64."""
    library().bench_triad(a.ctypes.data, b.ctypes.data, c.ctypes.data, 3.0, a.size)


def hand_over(count: int) -> None:
    """Two threads wake each other in turn, ``2 * count`` times."""
    library().bench_hand_over(count)


def copy(to: np.ndarray, source: np.ndarray) -> None:
    """memcpy, whatever the dtypes."""
    library().bench_copy(to.ctypes.data, source.ctypes.data, source.nbytes)


class Region:
    """Memory that the ranks of a job share: a barrier, and a slot of bytes for each rank."""

    def __init__(self, path: str, rank: int, size: int, slot_nbytes: int = 0) -> None:
        """Collective, but does not wait. The file is removed by ``remove``."""
        self._handle = library().bench_open(path.encode(), rank, size, slot_nbytes)
        if self._handle is None:
            raise MemoryError(f"{path}: {size} x {slot_nbytes} bytes of shared memory")
        self._path, self._rank = path, rank

    def barrier(self) -> None:
        library().bench_barrier(self._handle)

    def copy_loop(self, tensor: np.ndarray) -> None:
        """Sums float32, or halves as if they were integers, over the ranks, in place."""
        library().bench_copy_loop(
            self._handle, tensor.ctypes.data, tensor.size, tensor.dtype.itemsize
        )

    def remove(self) -> None:
        """Removes the file's name, once all ranks have opened it. Collective."""
        self.barrier()
        if self._rank == 0:
            os.unlink(self._path)

    def close(self) -> None:
        library().bench_close(self._handle)
