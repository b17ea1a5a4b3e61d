"""The types of the public names: a user's program is checked as strictly as mypy can."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_a_program() -> None:
    """Also what is wrong in it: an unneeded ``type: ignore`` is an error."""
    command = [sys.executable, "-m", "mypy", "--strict", "tests/typed/program.py"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_says_that_it_has_types() -> None:
    assert (_ROOT / "gradred" / "py.typed").exists()
