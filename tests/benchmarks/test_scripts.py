"""Each benchmark runs, counts no wrong element, and leaves a readable result."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

# Name of the script -> its smallest use, and what it needs.
SCRIPTS = {
    "allreduce": ("--contestants gradred,mpi,copy", "mpi4py"),
    "algorithms": ("--algorithms ring,native", "mpi4py"),
    "hierarchical": ("", "mpi4py"),
    "memory": ("", "numpy"),
    "negotiation": ("", "mpi4py"),
    # One rank: TensorFlow takes seconds to start.
    "overlap": ("--ranks 1 --parts work,brute", "tensorflow"),
    "pde_scaling": ("--parts weak", "tensorflow"),
    "step": ("--ranks 1", "tensorflow"),
    "timeline": ("", "numpy"),
    "train": ("--ranks 1", "tensorflow"),
}


@pytest.mark.launch
@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, tmp_path: Path) -> None:
    words, needs = SCRIPTS[name]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    shared_before = set(os.listdir("/dev/shm"))
    out = tmp_path / "result.json"
    command = [sys.executable, str(_ROOT / "benchmarks" / f"{name}.py"), "--quick"]
    command += ["--out", str(out), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["benchmark"] == name
    assert result["machine"]["cores"] > 0
    assert result["versions"]["gradred"]
    assert result["rows"]
    assert all(row.get("wrong", 0) == 0 for row in result["rows"])
    picture = out.with_suffix(".svg")
    assert not picture.exists() or picture.read_text().startswith("<svg")
    left = {f for f in set(os.listdir("/dev/shm")) - shared_before if f.startswith("gradred-bench")}
    assert not left
