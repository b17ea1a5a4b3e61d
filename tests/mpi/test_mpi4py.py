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
    "from mpi4py import MPI\n"
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


def test_first(run_ranks) -> None:
    result = run_ranks(3, FIRST)
    assert result.returncode == 0, result.text


def test_later(run_ranks) -> None:
    result = run_ranks(3, LATER)
    assert result.returncode == 0, result.text


def test_launcher_says_four_and_mpi_sees_one(tmp_path) -> None:
    world = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    # Open MPI without a launcher leaves its segment, whoever uses it.
    elsewhere = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import gradred as gr; gr.init(); print('trains alone')"],
        env={**os.environ, **world, **elsewhere},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "trains alone" not in done.stdout
    assert "started 4 processes" in done.stderr, done.stderr
