"""H20 and H12: a rank that is absent for long, and one that makes a step more."""

from __future__ import annotations

import re

from multiproc import failures

ABSENT = """
import time
import numpy as np
import gradred as gr

gr.init()
kernel, bias = np.ones(3), np.ones(2)
for step in range(3):
    if step == 2 and gr.rank() == 0:
        time.sleep(2.5)  # a checkpoint
    results = gr.grouped_allreduce([kernel, bias], gr.Sum, name="gradients")
    assert all((r == gr.size()).all() for r in results)
    assert gr.allreduce(1.0, gr.Sum, name="loss") == gr.size()
if gr.rank() == 0:
    time.sleep(2)  # forgets that every rank adds a set, members or not
gr.add_process_set([1, 2])
"""


def test_a_rank_that_writes_a_checkpoint(run_ranks) -> None:
    """Nobody fails. The program sets up no logging: the warning is on the standard error."""
    result = run_ranks(3, ABSENT, env={"GRADRED_STALL_WARN_SECONDS": "1"})
    assert result.returncode == 0, result.text
    lines = [line for err in result.err for line in err.splitlines() if "stall: " in line]
    added = [line for line in lines if "'add process set [1, 2]'" in line]
    assert added and len(lines) > len(added), result.text  # of the first to notice, not of all
    for line in lines:
        assert "rank 1 has waited" in line or "rank 2 has waited" in line, line
        assert "'gradients/0', 'gradients/1'" in line or line in added, line
        assert "not submitted by rank 0" in line, line
        assert 1.0 <= float(re.search(r"has waited ([\d.]+) s", line)[1]) < 2.0, line


# Rank 1 makes one step less, and then something else.
ONE_MORE = (
    failures._SURVIVE
    + """
steps = 6 if gr.rank() == 1 else 7
def run():
    for step in range(steps):
        gr.grouped_allreduce([np.ones(3), np.ones(2)], name="gradients")
    if gr.rank() == 1:
        END
        gr.allreduce(1.0, name="validation")
survive(run)
"""
)


def test_one_step_more_fails_within_the_limit(run_ranks) -> None:
    program = ONE_MORE.replace("END", "pass")
    limits = {"GRADRED_STALL_FAIL_SECONDS": "2", "GRADRED_STALL_WARN_SECONDS": "1"}
    result = run_ranks(3, program, env=limits)
    assert result.returncode != 0, result.text
    for rank in range(3):
        [(kind, text, seconds)] = failures.caught(result.out[rank])
        assert kind == "Timeout", result.text
        assert 1.9 < seconds < 4, result.text
        assert "gradients" in text or "validation" in text, text
        assert "rank 1" in text or "ranks 0" in text, text
    assert len({failures.caught(out)[0][1] for out in result.out}) == 1, result.text


def test_one_step_more_than_a_rank_that_has_ended(run_ranks) -> None:
    """No limit is needed where nothing can come any more."""
    result = run_ranks(3, ONE_MORE.replace("END", "return"))
    for rank in (0, 2):
        [(kind, text, seconds)] = failures.caught(result.out[rank])
        assert kind == "Abandoned", result.text
        assert "rank 1 has shut down: the process ended" in text, text
        assert seconds < 5
    assert [kind for kind, _, _ in failures.caught(result.out[1])] == ["nothing"]


def test_stall_limits_over_mpi(run_ranks) -> None:
    """H16"""
    failures.check_stall(run_ranks, "gradred")


PLAIN = """
import numpy as np
import gradred as gr

gr.init()
assert gr.size() == 2, gr.size()
assert (gr.allreduce(np.full(3, gr.rank()), gr.Sum) == 1).all()
print(gr.rank(), gr.local_rank(), gr.cross_size())
"""


def test_plain_mpirun(run_ranks) -> None:
    result = run_ranks(2, PLAIN, launcher="mpirun")
    assert result.returncode == 0, result.text
    assert result.out == ["0 0 1\n", "1 1 1\n"], result.text
