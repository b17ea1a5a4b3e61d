"""A disk that is full while shards are written."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "diffraction"))

import dataset


def test_a_full_disk_keeps_what_is_finished(tmp_path, monkeypatch):
    args = argparse.Namespace(seed=0, windows=1)
    patterns = np.zeros((2, *dataset.PATTERNS_SHAPE), np.float16)
    potential = np.zeros((2, *dataset.TARGET_SHAPE), np.float32)
    first, second = (dataset.shard_path(tmp_path, "train", k) for k in range(2))
    dataset.write_shard(first, patterns, potential, args)

    def full(file, **_):
        file.write(b"the first bytes")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(dataset.DataError, match=r"train-0001\.npz.*No space left.*are kept"):
        dataset.write_shard(second, patterns, potential, args)
    assert [path.name for path in tmp_path.iterdir()] == ["train-0000.npz"]
    assert dataset.shard_is_complete(first, 2, args)
