"""A rank that raises, exits, is killed or does not come, on shared memory alone."""

from __future__ import annotations

from multiproc import failures


def test_what_is_wrong_in_init_reaches_all(run_ranks) -> None:
    failures.check_init(run_ranks, "local")


def test_a_rank_that_ends_before_init(run_ranks) -> None:
    failures.check_late(run_ranks, "local", "sys.exit(3)", "before the job was open", "exit code 3")


def test_raise(run_ranks) -> None:
    failures.check_raise(run_ranks, "local")


def test_exit(run_ranks) -> None:
    failures.check_exit(run_ranks, "local")


def test_kill(run_ranks) -> None:
    failures.check_kill(run_ranks, "local", options=())  # with the launcher's own grace time


def test_abort(run_ranks) -> None:
    failures.check_abort(run_ranks, "local")


def test_stall_limits(run_ranks) -> None:
    failures.check_stall(run_ranks, "local")


NO_MPI = """
import sys
import numpy as np
import gradred as gr
gr.init()
assert gr.allreduce(np.ones(3), gr.Sum).tolist() == [3, 3, 3]
assert (gr.size(), gr.local_size(), gr.cross_size()) == (3, 3, 1)
maps = open("/proc/self/maps").read()
assert "libmpi" not in maps and "tensorflow" not in maps and "mpi4py" not in sys.modules
"""


def test_no_mpi_is_loaded(run_ranks) -> None:
    result = run_ranks(3, NO_MPI, launcher="local")
    assert result.returncode == 0, result.text
