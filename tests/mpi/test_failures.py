"""A rank that raises or is killed, over MPI; under plain mpirun the promise is an exit code."""

from __future__ import annotations

import pytest

from multiproc import failures


def test_what_is_wrong_in_init_reaches_all(run_ranks) -> None:
    failures.check_init(run_ranks, "gradred")


def test_a_rank_that_ends_before_init(run_ranks) -> None:
    failures.check_late(
        run_ranks, "gradred", "sys.exit(3)", "ended before the job was open", "exit code 3"
    )


def test_a_rank_that_cannot_open_mpi(run_ranks) -> None:
    library = 'os.environ["GRADRED_MPI_LIBRARY"] = "/no/such/libmpi.so"'
    failures.check_late(
        run_ranks, "gradred", library, "could not open the job", "/no/such/libmpi.so"
    )


def test_raise(run_ranks) -> None:
    failures.check_raise(run_ranks, "gradred")


def test_kill(run_ranks) -> None:
    failures.check_kill(run_ranks, "gradred")


def test_kill_where_mpi4py_would_finalize(run_ranks) -> None:
    failures.check_kill(run_ranks, "gradred", "from mpi4py import MPI\n" + failures.KILL)


@pytest.mark.parametrize("program", [failures.RAISE, failures.KILL], ids=["raise", "kill"])
def test_plain_mpirun(run_ranks, program: str) -> None:
    """Nothing is left behind either: run_ranks looks."""
    result = run_ranks(3, program, launcher="mpirun")
    assert result.returncode != 0, result.text
