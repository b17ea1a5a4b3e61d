"""The MPI fabric in C++ under mpirun (tests/native/mpi_ranks.cpp), and its tables against mpi.h."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.launches import JobResult, find_mpirun

_ROOT = Path(__file__).parents[2]
# run_ranks starts Python programs; this one becomes the program under test.
_EXEC = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"

RunNative = Callable[..., JobResult]


@pytest.fixture
def run_native(run_ranks: Callable[..., JobResult]) -> RunNative:
    """Starts mpi_ranks on `size` ranks by plain mpirun."""
    folder = os.environ.get("GRADRED_TEST_NATIVE")
    if folder is None:
        pytest.skip("GRADRED_TEST_NATIVE, the folder of the C++ tests, is not set")
    if find_mpirun() is None:
        pytest.skip("there is no mpirun")
    program = str(Path(folder, "mpi_ranks"))

    def run(size: int, *args: str, env: dict[str, str] | None = None) -> JobResult:
        words = [program, f"--prefix={sys.prefix}", *args]
        return run_ranks(size, _EXEC, words, launcher="mpirun", env=env, timeout=240.0)

    return run


def is_mpich() -> bool:
    """Whether mpirun is the one of MPICH, Hydra."""
    version = subprocess.run([str(find_mpirun()), "--version"], capture_output=True, text=True)
    return "HYDRA" in version.stdout


def assert_passed(result: JobResult, ranks: int) -> None:
    """Every one of `ranks` ranks has passed tests, and none has failed."""
    assert result.returncode == 0, result.text
    passed = [out for out in result.out if re.search(r"^[1-9]\d* passed, 0 failed$", out, re.M)]
    assert len(passed) == ranks, result.text


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_transport_and_communicator_conform(run_native: RunNative, size: int) -> None:
    result = run_native(size)
    assert_passed(result, size)
    assert f"{size} ranks: " in result.out[0], result.text


def test_another_order_of_some_ranks(run_native: RunNative) -> None:
    result = run_native(3, "--mode=ranks")
    assert_passed(result, 2)
    assert result.out[0] == "refused well\n", result.text


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_mpi_initialised_by_the_program(run_native: RunNative, level: str) -> None:
    result = run_native(3, f"--mode=adopt-{level}")
    assert_passed(result, 3)
    assert "initialised by the program" in result.out[0], result.text
    warnings = [out.count("log: ") for out in result.out]
    assert warnings == [int(level == "serialized")] * 3, result.text


def test_a_lower_thread_level_is_refused(run_native: RunNative) -> None:
    result = run_native(2, "--mode=adopt-funneled")
    assert result.returncode == 0, result.text
    assert result.out == ["refused well\n"] * 2, result.text


def test_opened_again_after_closing(run_native: RunNative) -> None:
    assert_passed(run_native(3, "--mode=reopen"), 3)


def test_a_forked_child_calls_nothing(run_native: RunNative) -> None:
    assert_passed(run_native(2, "--mode=fork"), 2)


def test_nothing_is_called_after_an_abort(run_native: RunNative) -> None:
    """MPI stays initialised; the program finalizes it in the end, so that its files are removed."""
    if is_mpich():
        pytest.skip("MPICH cannot be finalized with messages pending, and else leaves a file")
    result = run_native(3, "--mode=abort")
    assert result.returncode == 0, result.text
    for rank, out in enumerate(result.out):
        assert f"rank {rank}: aborted well\nleft alone at exit\n" in out, result.text


def test_ranks_that_mpi_does_not_join_are_refused(run_native: RunNative) -> None:
    """A launcher says four processes, and MPI finds one."""
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    result = run_native(1, env=slurm)
    assert result.returncode == 0, f"the variables of mpirun count first\n{result.text}"
    alone = subprocess.run(
        [f"{os.environ['GRADRED_TEST_NATIVE']}/mpi_ranks", f"--prefix={sys.prefix}"],
        # Alone, Open MPI 5 leaves its shared memory behind.
        env={**os.environ, **slurm, "OMPI_MCA_btl": "self"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert alone.returncode == 1, alone.stdout + alone.stderr
    assert "srun started 4 processes, yet each is alone in MPI (size 1, expected 4)" in alone.stdout


def _headers() -> list[Path]:
    folders = [f"{sys.prefix}/include", "/usr/include", "/usr/local/include"]
    if (mpirun := find_mpirun()) is not None:
        folders.append(str(Path(mpirun).resolve().parents[1] / "include"))
    for pattern in ("/usr/lib/*/openmpi/include", "/usr/include/*/mpich", "/usr/include/*/mpi"):
        folders += glob.glob(pattern)
    names = [Path(folder, name) for folder in folders for name in ("mpi.h", "mpi_abi.h")]
    return sorted({path.resolve() for path in names if path.exists()})


def test_tables_agree_with_mpi_h(tmp_path: Path) -> None:
    """One check program for each mpi.h, and each mpi_abi.h (the standard ABI), that is found."""
    compiler = shutil.which("c++") or shutil.which("g++")
    headers = _headers()
    if compiler is None or not headers:
        pytest.skip("no C++ compiler or no mpi.h")
    for header in headers:
        program = tmp_path / "check"
        command = [compiler, "-std=c++17", f"-I{_ROOT / 'native/src'}", f"-I{header.parent}"]
        command += [f"-DGRADRED_MPI_H=<{header.name}>", "-o", str(program)]
        command += [str(_ROOT / "tests/native/mpi_abi_check.cpp")]
        built = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert built.returncode == 0, f"{header}\n{built.stderr}"
        ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=20)
        assert ran.returncode == 0, f"{header}\n{ran.stdout}"
