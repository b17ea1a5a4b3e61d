"""Small jobs that a test starts for itself, because it kills a rank, exits or changes settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
SHM = "/dev/shm"
TOKEN = "GRADRED_TEST_JOB"  # in the environment of every process of the job


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    `codes[r]` is negative for a signal, and None for a rank that was ended with its parent.
    """

    returncode: int
    out: list[str]
    err: list[str]
    codes: list[int | None]
    launcher_out: str
    launcher_err: str
    seconds: float

    @property
    def text(self) -> str:
        """Everything that was printed, for messages."""
        parts = [f"launcher: exit code {self.returncode} after {self.seconds:.1f} s"]
        parts += [self.launcher_out, self.launcher_err]
        for rank, code in enumerate(self.codes):
            parts += [f"--- rank {rank}: {code}", self.out[rank], self.err[rank]]
        return "\n".join(part.rstrip() for part in parts if part)


def find_mpirun() -> str | None:
    """The mpirun of the running environment, else of PATH."""
    return shutil.which("mpirun", path=f"{sys.prefix}/bin") or shutil.which("mpirun")


def command_line(launcher: str, size: int) -> list[str]:
    """The words that start a job of `size` ranks."""
    gradred = [sys.executable, "-m", "gradred.launch", "run", "-np", str(size), "--no-tag"]
    if launcher == "gradred":
        return gradred
    if launcher == "local":
        return [*gradred, "--launcher", "local"]
    if launcher == "mpirun":
        return [find_mpirun() or "mpirun", "-n", str(size)]
    if os.path.isabs(launcher):
        return [launcher, "-n", str(size)]
    raise ValueError(f"launcher {launcher!r} is not gradred, local, mpirun or the path of one")


def processes_of(token: str) -> dict[int, str]:
    """Living processes with the token in their environment: pid -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{TOKEN}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
        except OSError:
            continue
    return found


def left_in_shm(before: set[str]) -> set[str]:
    """New files in /dev/shm that no living process has mapped: another job's files are in use."""
    new = set(os.listdir(SHM)) - before
    if new:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            try:
                text = maps.read_text(errors="replace")
            except OSError:
                continue
            new -= {name for name in new if f"{SHM}/{name}\n" in text}
    return {name for name in new if os.path.exists(f"{SHM}/{name}")}


def _leftovers(token: str, files_before: set[str]) -> str:
    lines = [f"process {pid}: {line}" for pid, line in processes_of(token).items()]
    lines += [f"{SHM}/{name}" for name in sorted(left_in_shm(files_before))]
    return "\n".join(lines)


@dataclass
class Launcher:
    folder: Path
    count: int = field(default=0)

    def __call__(
        self,
        size: int,
        program: str | Path,
        args: Sequence[str] = (),
        *,
        launcher: str = "gradred",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        timeout: float = 60.0,
    ) -> JobResult:
        """Runs a program (a file, or Python text) on `size` ranks and waits for its end.

        launcher is "gradred", "local" (gradred run without MPI), "mpirun", or the path of another
        mpirun; options are further words for it. Fails when the job outlives timeout (seconds), or
        leaves a process or a file in /dev/shm.
        """
        self.count += 1
        folder = self.folder / f"job-{self.count}"
        folder.mkdir()
        if isinstance(program, str):
            (folder / "program.py").write_text(program)
            program = folder / "program.py"
        token = uuid.uuid4().hex
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "2",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            **(env or {}),
            TOKEN: token,
        }
        command = [*command_line(launcher, size), *options]
        command += [sys.executable, str(_HERE / "rank.py"), str(folder)]
        command += [sys.executable, "-u", str(program), *args]
        files_before = set(os.listdir(SHM))
        start = time.monotonic()
        timed_out = False
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()
            for pid in processes_of(token):
                os.kill(pid, 9)
            out, err = process.communicate()
        result = JobResult(
            process.returncode,
            [_read(folder / f"{rank}.out") for rank in range(size)],
            [_read(folder / f"{rank}.err") for rank in range(size)],
            [_code(folder / f"{rank}.status") for rank in range(size)],
            out,
            err,
            time.monotonic() - start,
        )
        if timed_out:
            pytest.fail(f"the job did not end within {timeout:g} s\n{result.text}")
        end = time.monotonic() + 2.0
        while (left := _leftovers(token, files_before)) and time.monotonic() < end:
            time.sleep(0.05)
        if left:
            for pid in processes_of(token):
                os.kill(pid, 9)
            pytest.fail(f"the job left behind:\n{left}\n{result.text}")
        return result


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _code(path: Path) -> int | None:
    return int(path.read_text()) if path.exists() else None


@pytest.fixture
def run_ranks(tmp_path: Path) -> Iterator[Callable[..., JobResult]]:
    """Starts a small job: see Launcher.__call__."""
    yield Launcher(tmp_path)
