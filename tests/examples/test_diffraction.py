"""The diffraction example, small: simulate, train, resume on other ranks, float16, damaged data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.launch

HERE = Path(__file__).parents[2] / "examples" / "diffraction"
sys.path.insert(0, str(HERE))

from dataset import DataError, load_split, read_shard  # noqa: E402


def run(size: int, script: str, *options: object, timeout: float = 240):
    """The script on `size` ranks: (exit code, everything printed)."""
    command = [sys.executable, "-m", "gradred.launch", "run", "-np", size]
    command += [sys.executable, HERE / script, *options]
    threads = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **threads},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        text=True,
    )
    return done.returncode, done.stdout


def fake_shards(folder: Path, shards: int = 2, samples: int = 6) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        for k in range(shards):
            patterns = rng.normal(size=(samples, 64, 64, 64)).astype(np.float16)
            potential = rng.normal(size=(samples, 64, 64)).astype(np.float32)
            np.savez(
                folder / f"{split}-{k:04d}.npz", patterns=patterns, potential=potential, recipe="{}"
            )


def test_train_and_resume_on_other_ranks(tmp_path):
    fake_shards(tmp_path / "data")
    common = ["--data", tmp_path / "data", "--out", tmp_path / "out", "--preset", "tiny"]
    code, text = run(2, "train.py", *common, "--batch", 3, "--epochs", 1)
    assert code == 0, text
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    assert first["ranks"] == 2 and first["train_samples"] == 12
    assert first["flop_per_sample"] > 1e6 and first["bytes"] > 0
    assert (tmp_path / "out" / "reconstruction.png").read_bytes()[:4] == b"\x89PNG"
    # Go on with a loop of its own, half wires and two groups, on three ranks.
    code, text = run(
        3, "train_loop.py", *common, "--batch", 2, "--epochs", 2, "--resume",
        "--wire", "float16", "--groups", 2,
    )  # fmt: skip
    assert code == 0, text
    second = json.loads((tmp_path / "out" / "results.json").read_text())
    assert second["ranks"] == 3 and len(second["loss"]) == 1
    assert second["groups"] >= 2 * 2  # two groups a step, two steps


def test_overflow_on_one_rank_skips_everywhere():
    code, text = run(2, "overflow.py")
    assert code == 0, text
    assert "skipped steps [7] of 20" in text


def test_damaged_shard_ends_all_ranks(tmp_path):
    fake_shards(tmp_path)
    damaged = tmp_path / "train-0001.npz"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"train-0001\.npz is damaged"):
        load_split(tmp_path, "train", 0, 1)
    code, text = run(2, "train.py", "--data", tmp_path, "--out", tmp_path / "out")
    assert code != 0
    for rank in (0, 1):
        assert f"[{rank}] train.py: DataError" in text, text


def test_shards_of_another_shape_are_named(tmp_path):
    path = tmp_path / "train-0000.npz"
    np.savez(path, patterns=np.zeros((2, 3), np.float16), potential=np.zeros(2), recipe="{}")
    with pytest.raises(
        DataError, match=r"expected patterns \[2, 64, 64, 64\] float16, got \[2, 3\]"
    ):
        read_shard(path)
    with pytest.raises(DataError, match="no test shards"):
        load_split(tmp_path, "test", 0, 1)


def test_parts_of_ranks_are_disjoint_and_equal(tmp_path):
    fake_shards(tmp_path, shards=3, samples=5)
    everything, _ = load_split(tmp_path, "train", 0, 1)
    parts = [load_split(tmp_path, "train", rank, 4)[0] for rank in range(4)]
    assert {len(part) for part in parts} == {3}
    together = np.stack(parts, 1).reshape(12, -1)
    assert np.array_equal(together, everything[:12].reshape(12, -1))


def test_unknown_options_are_refused(tmp_path):
    code, text = run(1, "train.py", "--precision", "float8")
    assert code != 0
    assert "invalid choice: 'float8'" in text


def test_simulate(tmp_path):
    pytest.importorskip("abtem")
    options = ["--out", tmp_path, "--train", 2, "--test", 1, "--windows", 1]
    code, text = run(2, "generate.py", *options)
    assert code == 0, text
    patterns, potential, _ = read_shard(tmp_path / "train-0000.npz")
    assert patterns.shape == (2, 64, 64, 64) and potential.shape == (2, 64, 64)
    # 16 sqrt(I): the intensities of one pattern sum to about 1, the beam's.
    intensity = np.square(patterns[0, 0].astype(np.float64) / 16).sum()
    assert 0.5 < intensity <= 1.01
    assert potential.std() > 0
    code, text = run(1, "generate.py", *options)
    assert code == 0 and "nothing to do" in text, text
    code, text = run(1, "generate.py", *options, "--seed", 1)
    assert code != 0 and "use another --out" in text, text
