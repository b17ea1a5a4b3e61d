"""Jobs of some of the ranks that were started without MPI, and ranks that were started wrongly."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LISTS = """
import os
import numpy as np
import gradred as gr

me = int(os.environ["GRADRED_LOCAL_RANK"])

def use(ranks):
    gr.init(ranks)
    assert (gr.rank(), gr.size()) == (ranks.index(me), len(ranks))
    assert (gr.allreduce(np.full(3, me), gr.Sum) == sum(ranks)).all()
    gr.shutdown()

use([2, 0, 1])
use([0, 2] if me != 1 else [1])
for bad, text in (
    ([0, 3], "expected ranks of the job's 3"),
    ([(me + 1) % 3], f"rank {me} of the job is not in ranks [{(me + 1) % 3}]"),
):
    try:
        gr.init(bad)
    except gr.InvalidArgument as error:
        assert text in str(error), error
    else:
        raise AssertionError(bad)
use([0, 1, 2])
"""


def test_lists_of_ranks(run_ranks) -> None:
    result = run_ranks(3, LISTS, launcher="local")
    assert result.returncode == 0, result.text


@pytest.mark.parametrize(
    ("call", "variables", "text"),
    [
        ("gr.init([0]); assert gr.size() == 1; sys.exit('ok')", {}, "ok"),
        ("gr.init([1])", {}, "ranks [1]: expected ranks of the job's 1"),
        ("gr.init([0, 1])", {}, "ranks [0, 1]: expected ranks of the job's 1"),
        ("gr.init()", {"GRADRED_TRANSPORT": "local"}, "gradred run --launcher local"),
    ],
)
def test_one_process(call: str, variables: dict[str, str], text: str) -> None:
    foreign = ("GRADRED_", "OMPI_", "PMI", "PRTE_", "SLURM_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; import gradred as gr; {call}"],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert text in done.stderr, done.stderr
