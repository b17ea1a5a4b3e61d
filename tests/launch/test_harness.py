"""The harness itself: what is reported when ranks fail, differ or hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_HEAD = "import pytest, sys, time\n\n"


def run_tests(folder: Path, text: str, size: int = 2) -> tuple[int, str]:
    """Runs tests in a job of `size` ranks without MPI; the exit code and all output."""
    file = folder / "test_sample.py"
    file.write_text(_HEAD + text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gradred.launch", "run", "-np", str(size)),
            *("--launcher", "local", "--no-tag", "--grace", "3"),
            *(sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"),
            *("-c", str(_ROOT / "pyproject.toml"), "--rootdir", str(_ROOT), str(file)),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT / 'tests'}", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


pytestmark = pytest.mark.launch


def test_sizes_meeting_and_one_report(tmp_path: Path) -> None:
    code, text = run_tests(
        tmp_path,
        """
@pytest.mark.ranks(2, 3)
def test_meets(job, rank, size, shared_dir):
    (shared_dir / str(rank)).touch()
    assert job.exchange(rank * 10) == [0, 10]
    assert len(list(shared_dir.iterdir())) == size == 2

@pytest.mark.ranks(3)
def test_for_three():
    assert False

def test_for_one_process():
    assert False

@pytest.mark.ranks
def test_for_two_by_default(rank, size):
    assert size == 2
""",
    )
    assert code == 0, text
    assert text.count("2 passed, 2 deselected") == 1, text


def test_failure_on_one_rank_fails_all_and_shows_all(tmp_path: Path) -> None:
    code, text = run_tests(
        tmp_path,
        """
pytestmark = pytest.mark.ranks(2)

def test_fails_on_one(rank):
    print("printed by", rank)
    assert rank == 0, "wrong on one"

@pytest.fixture
def broken(rank):
    assert rank == 0, "set-up is wrong"

def test_set_up_fails_on_one(broken):
    time.sleep(1000)

def test_skipped_on_one(rank):
    if rank == 1:
        pytest.skip("not here")

def test_goes_on(rank):
    pass

def test_skipped_on_all():
    pytest.skip("nowhere")
""",
    )
    assert code == 1, text
    assert "3 failed, 1 passed, 1 skipped, 1 error" in text
    for part in (
        "failed on ranks [1]",
        "printed by 0",
        "printed by 1",
        "AssertionError: wrong on one",
        "set-up is wrong",
        "not the same on all ranks: ['passed', 'skipped']",
        "rank 1: skipped",
    ):
        assert part in text, f"{part!r} is not in\n{text}"


@pytest.mark.parametrize("hanging", [0, 1])
def test_hang_shows_stacks_and_ends_the_job(tmp_path: Path, hanging: int) -> None:
    code, text = run_tests(
        tmp_path,
        f"""
@pytest.mark.ranks(2, deadline=1)
def test_hangs(rank):
    if rank == {hanging}:
        time.sleep(1000)
    assert False, "the other fails"
""",
    )
    assert code != 0
    assert "Timeout (0:00:01)!" in text
    assert "in test_hangs" in text
    assert "the other fails" in text


def test_exit_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    code, text = run_tests(
        tmp_path,
        """
import os

@pytest.mark.ranks(2)
def test_leaves(rank):
    if rank == 1:
        os._exit(7)

@pytest.mark.ranks(2)
def test_never():
    pass
""",
    )
    assert code == 7
    assert "rank 1 ended before the end of" in text and "test_leaves" in text
    assert "1 failed" in text


def test_different_tests_are_refused(tmp_path: Path) -> None:
    code, text = run_tests(
        tmp_path,
        """
import os

if os.environ["GRADRED_LOCAL_RANK"] == "0":
    @pytest.mark.ranks(2)
    def test_only_on_rank_0():
        pass
""",
    )
    assert code != 0
    assert "rank 0 runs 1 tests, rank 1 0" in text
