"""Shards of diffraction samples on disk: written whole or not at all, checked when read."""

from __future__ import annotations

import argparse
import json
import os
import zipfile
from pathlib import Path

import numpy as np

SHARD_STRUCTURES = 8  # structures a shard
PATTERNS_SHAPE = (64, 64, 64)  # probe positions, pixels, pixels
TARGET_SHAPE = (64, 64)


class DataError(Exception):
    """Data is missing, damaged, or of another shape; says what, where and what to do."""


def shard_path(folder: Path, split: str, k: int) -> Path:
    return folder / f"{split}-{k:04d}.npz"


def _recipe(args: argparse.Namespace) -> str:
    return json.dumps({"seed": args.seed, "windows": args.windows}, sort_keys=True)


def write_shard(
    path: Path, patterns: np.ndarray, potential: np.ndarray, args: argparse.Namespace
) -> None:
    """Write patterns [n, 64, 64, 64] float16 and potential [n, 64, 64] float32.

    The file becomes visible when it is complete.
    """
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        with open(part, "wb") as file:
            np.savez(file, patterns=patterns, potential=potential, recipe=_recipe(args))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        size = patterns.nbytes + potential.nbytes
        raise DataError(
            f"cannot write {path} ({size / 1e6:.0f} MB): {error}; shards that are finished are kept"
        ) from error


def read_shard(path: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """Patterns [n, 64, 64, 64] float16, potential [n, 64, 64] float32, and their recipe."""
    try:
        with np.load(path, allow_pickle=False) as shard:
            patterns, potential = shard["patterns"], shard["potential"]
            recipe = str(shard["recipe"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} is damaged or no shard ({error}); delete it and run generate.py again"
        ) from error
    n = len(patterns)
    for name, array, shape, dtype in (
        ("patterns", patterns, (n, *PATTERNS_SHAPE), np.float16),
        ("potential", potential, (n, *TARGET_SHAPE), np.float32),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise DataError(
                f"{path}: expected {name} {list(shape)} {np.dtype(dtype)}, "
                f"got {list(array.shape)} {array.dtype}"
            )
    return patterns, potential, recipe


def shard_is_complete(path: Path, structures: int, args: argparse.Namespace) -> bool:
    """Whether ``path`` holds that many structures of this recipe; another recipe is an error."""
    if not path.exists():
        return False
    patterns, _, recipe = read_shard(path)
    if recipe != _recipe(args):
        raise DataError(f"{path} was made with {recipe}, not {_recipe(args)}; use another --out")
    return len(patterns) >= structures * args.windows


def load_split(folder: Path, split: str, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's part of a split: every ``size``-th sample, equally many on each rank.

    Returns patterns [n, 64, 64, 64] float16 and potential [n, 64, 64] float32. The parts are
    disjoint and do not depend on how many ranks wrote the shards.
    """
    paths = sorted(folder.glob(f"{split}-*.npz"))
    if not paths:
        raise DataError(f"no {split} shards in {folder}; run generate.py --out {folder} first")
    patterns, potential, first = [], [], 0
    total = 0
    for path in paths:
        x, y, _ = read_shard(path)
        start = (rank - first) % size
        patterns.append(x[start::size])
        potential.append(y[start::size])
        first = (first + len(x)) % size
        total += len(x)
    if total < size:
        raise DataError(f"{folder} has {total} {split} samples for {size} ranks")
    keep = total // size
    return np.concatenate(patterns)[:keep], np.concatenate(potential)[:keep]
