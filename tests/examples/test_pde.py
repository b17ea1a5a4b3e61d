"""The inversions of examples/pde, small: they lower the error, resume, and say what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch

HERE = Path(__file__).parents[2] / "examples" / "pde"
SMALL_WAVE = ["--nodes", 32, "--shots", 4, "--seconds", 1.0]


def run(size: int, script: str, out: Path, *options: object) -> tuple[int, str, dict]:
    """The script on `size` ranks: (exit code, everything printed, results)."""
    command = [sys.executable, "-m", "gradred.launch", "run", "-np", size, "--bind", "none"]
    command += [sys.executable, HERE / script, "--out", out, *options]
    threads = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **threads},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        text=True,
    )
    results = out / "results.json"
    return done.returncode, done.stdout, json.loads(results.read_text()) if results.exists() else {}


def test_acoustic_inversion_with_shots_and_grids_over_ranks_and_a_restart(tmp_path):
    options = [*SMALL_WAVE, "--iterations", 12]
    code, text, first = run(4, "acoustic_fwi.py", tmp_path, *options, "--ranks-per-shot", 2)
    assert code == 0, text
    assert first["ranks_per_shot"] == 2 and first["seconds"] > 0 and len(first["misfit"]) == 12
    assert first["misfit"][-1] < 0.3 * first["misfit"][0]
    assert first["error"] < 0.7 * first["error_of_start"]
    assert (tmp_path / "recovered.png").read_bytes()[:4] == b"\x89PNG"
    # Go on with another number of ranks.
    code, text, more = run(
        2, "acoustic_fwi.py", tmp_path, *SMALL_WAVE, "--iterations", 4, "--resume"
    )
    assert code == 0, text
    assert more["misfit"][0] < 1.2 * first["misfit"][-1]
    assert more["error"] < 1.1 * first["error"]


def test_heat_inversion(tmp_path):
    options = ["--nodes", 23, "--iterations", 20]
    code, text, results = run(2, "heat_conductivity.py", tmp_path, *options)
    assert code == 0, text
    assert results["misfit"][-1] < 0.5 * results["misfit"][0]
    assert results["error"] < 0.9 * results["error_of_start"]


def test_poisson_inversion(tmp_path):
    """With Adam; the others with L-BFGS."""
    options = ["--nodes", 19, "--iterations", 40, "--method", "differences"]
    options += ["--optimizer", "adam", "--learning-rate", 1e-2]
    code, text, results = run(2, "poisson_inverse.py", tmp_path, *options)
    assert code == 0, text
    assert results["optimizer"] == "adam" and len(results["misfit"]) == 40
    assert results["misfit"][-1] < 0.5 * results["misfit"][0]
    assert results["error"] < 0.9 * results["error_of_start"]
