"""The order of communication is the same on all ranks: see hazards.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diff import hazards


@pytest.mark.smoke
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("check", hazards.CHECKS, ids=lambda check: check.__name__)
def test_order(check, context):
    check(context)


def test_with_one_inter_op_thread(run_ranks):
    """No thread of TensorFlow's waits for another rank: one is enough."""
    root = Path(__file__).parents[2]
    environment = {"TF_NUM_INTEROP_THREADS": "1", "PYTHONPATH": f"{root}:{root / 'tests'}"}
    job = run_ranks(2, Path(hazards.__file__), env={**os.environ, **environment}, timeout=110)
    assert job.returncode == 0, job.text
    assert all(f"passed {len(hazards.CHECKS)}" in out for out in job.out), job.text
