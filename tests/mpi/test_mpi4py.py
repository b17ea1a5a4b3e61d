"""mpi4py imported before or after us, and launchers that do not belong to the library."""

from __future__ import annotations

import os
import subprocess
import sys

_USE = """
import os, sys
import numpy as np
import gradred as gr

def use(size):
    assert gr.size() == size, gr.size()
    assert (gr.allreduce(np.ones(3), gr.Sum) == size).all()
    assert "MPI" in gr.describe(), gr.describe()

def same_library():
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line}
    libraries = {os.path.realpath(name) for name in libraries if "libmpi.so" in name}
    assert len(libraries) == 1, libraries
"""

FIRST = (
    "from mpi4py import MPI\nfrom gradred import process_sets\n"
    + _USE
    + """
world = MPI.COMM_WORLD
gr.init()
use(3)
assert gr.rank() == world.rank
gr.shutdown()
assert world.allreduce(1) == 3

part = world.Split(world.rank == 2, world.rank)
gr.init(part)
use(part.size)
gr.shutdown()
part.Free()

if world.rank != 1:
    gr.init([0, 2])
    use(2)
    gr.shutdown()

# Sets from communicators: parts of a split, one that rank 2 is not in, ranks in another order.
pair = world.Create_group(world.group.Incl([0, 1])) if world.rank != 2 else MPI.COMM_NULL
split, of_pair, all_of = gr.ProcessSet(part := world.Split(world.rank % 2)), gr.ProcessSet(pair), \
    gr.ProcessSet(world.Split(0, -world.rank))
gr.init(process_sets=[split, of_pair])
gr.add_process_set(all_of)
assert split.ranks == ([0, 2], [1])[gr.rank() % 2], split
assert (of_pair.ranks, all_of.ranks) == ([0, 1], [0, 1, 2]), (of_pair, all_of)
for process_set in (split, of_pair, all_of):
    if process_set.included():
        total = gr.allreduce(np.ones(3), gr.Sum, process_set=process_set)
        assert (total == process_set.size()).all()
assert gr.remove_process_set(split)
assert split.process_set_id is None
assert gr.add_process_set(split).included()  # both parts were free again
gr.shutdown()
gr.init(world.Split(0, -world.rank))  # ranks the other way round
assert gr.rank() == 2 - world.rank
gr.add_process_set(of_pair)
assert of_pair.ranks == [1, 2], of_pair
assert of_pair.included() == (world.rank != 2)
try:
    gr.add_process_set(gr.ProcessSet(part))
    lost = gr.ProcessSet(pair if world.rank == 0 else MPI.COMM_NULL)
    gr.add_process_set(lost)
    raise AssertionError(lost)
except gr.InvalidArgument as error:
    assert "already" in str(error), error
# A split of which the second part is a set already: the first does not become one.
halves = gr.ProcessSet(world.Split(gr.rank() == 0))
for _ in range(2):
    try:
        gr.add_process_set(halves)
        raise AssertionError(halves)
    except gr.InvalidArgument as error:
        assert "has the ranks [1, 2] already" in str(error), error
assert gr.remove_process_set(of_pair)
assert gr.add_process_set(halves).ranks == ([0] if gr.rank() == 0 else [1, 2]), halves
gr.remove_process_set(halves)
# What fails on the way leaves nothing behind, and fails alike on all ranks.
add, calls = process_sets.core.add_process_set, []
def full_after_one(ranks):
    calls.append(ranks)
    if len(calls) == 2:
        raise gr.Unsupported("no more sets")
    return add(ranks)
alone = gr.ProcessSet(MPI.COMM_SELF if gr.rank() < 2 else MPI.COMM_NULL)
for text, failing in (("rank 2 is in none of", add), ("no more sets", full_after_one)):
    process_sets.core.add_process_set = failing
    try:
        gr.add_process_set(alone if failing is add else halves)
        raise AssertionError(text)
    except gr.Error as error:
        assert text in str(error), error
    process_sets.core.add_process_set = add
    assert (alone.ranks, halves.ranks) == ([], []), (alone, halves)
for ranks in ([0], [1, 2]):
    assert gr.remove_process_set(gr.add_process_set(ranks)), ranks
assert gr.add_process_set(halves).included()
gr.shutdown()
for bad in (MPI.COMM_NULL,):
    try:
        gr.init(bad)
    except gr.InvalidArgument as error:
        assert "intracommunicator" in str(error)
    else:
        raise AssertionError
assert world.allreduce(1) == 3
same_library()
"""
)

LATER = (
    _USE
    + """
gr.init()
use(3)
from mpi4py import MPI
same_library()
assert MPI.Is_initialized()
assert MPI.COMM_WORLD.allreduce(1) == 3
assert MPI.COMM_WORLD.rank == gr.rank()
use(3)
gr.shutdown()
gr.init(MPI.COMM_WORLD)
use(3)
"""
)

# Each process is alone in MPI: the ranks are the launcher's.
LOCAL = """
from mpi4py import MPI
import os
import numpy as np
import gradred as gr

assert MPI.COMM_WORLD.size == 1
for transport, comm in (("mpi", None), ("auto", MPI.COMM_WORLD)):
    os.environ["GRADRED_TRANSPORT"] = transport
    try:
        gr.init(comm)
    except gr.InvalidArgument as error:
        assert "3 ranks were started without MPI" in str(error), error
        assert "alone in MPI" in str(error), error
    else:
        raise AssertionError("trains alone")
del os.environ["GRADRED_TRANSPORT"]
gr.init()
assert (gr.rank(), gr.size()) == (int(os.environ["GRADRED_LOCAL_RANK"]), 3)
assert (gr.allreduce(np.ones(3), gr.Sum) == 3).all()
"""

# The second init() finds an MPI that the first one has initialised.
ENDED = """
import sys
import gradred as gr
from gradred import _core
gr.init()
gr.shutdown()
from mpi4py import MPI
gr.init()
if gr.rank() == 1:
    _core.abort("Internal", "rank 1 was told to give up")
try:
    gr.barrier()
except gr.Internal:
    sys.exit(7)
"""


def test_local_launcher(run_ranks, tmp_path) -> None:
    # Open MPI without a launcher leaves its segment, whoever uses it.
    env = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    result = run_ranks(3, LOCAL, launcher="local", env=env)
    assert result.returncode == 0, result.text


def test_our_mpi_stays_ours(run_ranks) -> None:
    result = run_ranks(2, ENDED)
    assert result.codes == [7, 7], result.text


def test_first(run_ranks) -> None:
    result = run_ranks(3, FIRST)
    assert result.returncode == 0, result.text


def test_later(run_ranks) -> None:
    result = run_ranks(3, LATER)
    assert result.returncode == 0, result.text


# What launchers tell the first of four processes, and what the error says of it.
FOUR = {
    "mpirun of Open MPI": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
    "jsrun": {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "4"},
    "srun": {
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NTASKS": "4",
    },
    "mpiexec (Hydra of MPICH or Intel MPI)": {"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_FD": "99"},
    "a PMI launcher": {"PMI_RANK": "0", "PMI_SIZE": "4"},
    "horovodrun without MPI (Gloo)": {
        "HOROVOD_RANK": "0",
        "HOROVOD_SIZE": "4",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "OMPI_COMM_WORLD_SIZE": "1",  # started by another one, of a single process
        "OMPI_COMM_WORLD_RANK": "0",
    },
}


def test_launcher_says_four_and_mpi_sees_one(tmp_path) -> None:
    """S14"""
    processes = {
        launcher: subprocess.Popen(
            [sys.executable, "-c", "import gradred as gr; gr.init(); print('trains alone')"],
            # Open MPI without a launcher leaves its segment, whoever uses it.
            env={
                **os.environ,
                **variables,
                "OMPI_MCA_btl_sm_backing_directory": str(tmp_path),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for launcher, variables in FOUR.items()
    }
    for launcher, process in processes.items():
        out, err = process.communicate(timeout=60)
        assert process.returncode != 0, launcher
        assert "trains alone" not in out, launcher
        # Or there is no MPI of that launcher's family at all.
        said = (f"{launcher} started 4 processes", f"that fits the launcher, {launcher}")
        assert any(text in err for text in said), err
    assert "add --mpi to the horovodrun command" in err


def test_launchers_that_disagree() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import gradred as gr; gr.init(); print('trains alone')"],
        env={
            **os.environ,
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "4",
            "GRADRED_LOCAL_RANK": "0",
            "GRADRED_LOCAL_SIZE": "2",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "trains alone" not in done.stdout
    assert "2 ranks were started without MPI" in done.stderr, done.stderr
    assert "mpirun of Open MPI started 4" in done.stderr, done.stderr
