"""The real horovodrun starts our programs; Horovod and gradred live in one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradred.launch import mpirun

_ROOT = Path(__file__).parents[2]
HOROVODRUN = os.environ.get("GRADRED_TEST_HOROVODRUN") or shutil.which("horovodrun")

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(HOROVODRUN is None, reason="there is no horovodrun: make horovod"),
]


def run(line: list[str], program: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Runs a line in Horovod's environment, with Python text behind it; exit code and output."""
    assert HOROVODRUN is not None
    folder_of_programs = Path(HOROVODRUN).parent
    (folder / "program.py").write_text(program)
    python = [str(folder_of_programs / "python"), str(folder / "program.py"), str(folder)]
    done = subprocess.run(
        [*line, *python],
        env={
            **mpirun.clean_environment(os.environ),
            "PATH": f"{folder_of_programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(_ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            **variables,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def start_of_line() -> list[str]:
    """horovodrun with what the MPI in its environment needs."""
    assert HOROVODRUN is not None
    found = shutil.which("mpirun", path=f"{Path(HOROVODRUN).parent}:{os.environ['PATH']}")
    assert found is not None
    launcher = mpirun.identify(found)
    line = [HOROVODRUN, "-np", "2", "-H", "localhost:2", "--disable-cache"]
    if launcher.family == "Open MPI" and int(launcher.version.split(".")[0]) >= 5:
        line += ["--binding-args", "--bind-to none"]
    return line


FLAGS = """
import pathlib, sys
import numpy as np
import gradred as gr
from gradred import basics, built
gr.init()
values = basics.settings()
assert (values.group_bytes, values.groups) == (2 << 20, "bytes"), values
assert (values.stall_warn_seconds, values.stall_fail_seconds) == (5, 50), values
assert (values.log_level, values.mpi_threads) == ("debug", "serialized"), values
assert (values.thread_affinity, values.timeline_mark_cycles) == ("0", True), values
assert gr.size() == 2 and "MPI" in gr.describe(), gr.describe()
assert not built.mpi_threads_supported()
assert (gr.allreduce(np.ones(3), gr.Sum) == 2).all()
gr.shutdown()
files = sorted(path.name for path in pathlib.Path(sys.argv[1]).glob("t.rank*.json"))
assert f"t.rank{basics.os.environ['OMPI_COMM_WORLD_RANK']}.json" in files, files
print("all is well")
"""


def test_its_flags_and_a_job(tmp_path: Path) -> None:
    flags = [
        *("--mpi", "--fusion-threshold-mb", "2", "--cycle-time-ms", "3", "--cache-capacity", "7"),
        *("--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "50"),
        *("--timeline-filename", str(tmp_path / "t.json"), "--timeline-mark-cycles"),
        *("--log-level", "DEBUG", "--mpi-threads-disable", "--thread-affinity", "0"),
        *("--hierarchical-allreduce", "--no-torus-allreduce"),
    ]
    code, text = run([*start_of_line(), *flags], FLAGS, tmp_path)
    assert code == 0, text
    assert text.count("all is well") == 2, text
    assert text.count("HOROVOD_CYCLE_TIME=3.0 means nothing to gradred: ") == 1, text
    assert text.count("HOROVOD_CACHE_CAPACITY=7 means nothing") == 1, text
    assert "HIERARCHICAL" not in text and "TORUS" not in text, text


# As a build with Gloo: the launcher needs nothing of it but the answer that it is there.
WITH_GLOO = """
from horovod.runner import launch
launch.gloo_built = lambda verbose=False: True
launch.run_commandline()
"""


def test_without_mpi_nobody_trains_alone(tmp_path: Path) -> None:
    assert HOROVODRUN is not None
    python = str(Path(HOROVODRUN).parent / "python")
    line = [python, "-c", WITH_GLOO, "--gloo", *start_of_line()[1:]]
    program = "import gradred as gr\ngr.init()\nprint('trains alone')\n"
    code, text = run(line, program, tmp_path)
    assert code != 0
    assert "trains alone" not in text
    said = r"horovodrun without MPI \(Gloo\) started 2 processes.*add --mpi to the horovodrun"
    assert re.search(said, text), text


BOTH = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd
import gradred.tensorflow as ours
for module in (hvd, ours) if {horovod_first} else (ours, hvd):
    module.init()
rank = ours.rank()
assert (hvd.rank(), hvd.size(), ours.size()) == (rank, 2, 2)
x = tf.constant([1.0, 2.0]) * (rank + 1)
for step in range(3):
    for module in (ours, hvd):
        assert module.allreduce(x, op=module.Sum, name="x").numpy().tolist() == [3.0, 6.0]
ours.shutdown()
assert hvd.allreduce(x, op=hvd.Sum, name="y").numpy().tolist() == [3.0, 6.0]
ours.init()
hvd.shutdown()
assert ours.allreduce(x, op=ours.Sum).numpy().tolist() == [3.0, 6.0]
print("both are well")
"""


@pytest.mark.parametrize("horovod_first", [True, False])
def test_both_in_one_process(tmp_path: Path, horovod_first: bool) -> None:
    program = BOTH.format(horovod_first=horovod_first)
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60"}
    code, text = run(["mpirun", "-n", "2"], program, tmp_path, **variables)
    assert code == 0, text
    assert text.count("both are well") == 2, text
