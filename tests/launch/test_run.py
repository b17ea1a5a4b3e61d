"""Jobs started by ``gradred run``: output, exit codes, signals, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from gradred.launch.run import _End, _first
from harness.launches import SHM, TOKEN, find_mpirun, left_in_shm, processes_of
from launch.standins import LINES, STAND_INS, recorded

pytestmark = pytest.mark.launch


@contextmanager
def started(
    *words: str, stdin: int = subprocess.DEVNULL, stdout: int | IO[str] = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """A running `gradred run`; afterwards nothing of it may be left."""
    token = os.urandom(8).hex()
    folder = tempfile.mkdtemp(prefix="g")
    process = subprocess.Popen(
        [sys.executable, "-m", "gradred.launch", "run", *words],
        env={**os.environ, TOKEN: token, "TMPDIR": folder},
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
        assert process.wait(20) is not None
        end = time.monotonic() + 3
        while (left := processes_of(token)) and time.monotonic() < end:
            time.sleep(0.02)
        assert left == {}
        assert os.listdir(folder) == []
    finally:
        process.kill()
        for pid in processes_of(token):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)


def gradred_run(*words: str) -> subprocess.CompletedProcess[str]:
    with started(*words) as process:
        out, err = process.communicate(timeout=30)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def local(size: int, program: str, *options: str) -> list[str]:
    """Words that run Python text on ranks without MPI."""
    head = "import os, signal, sys, time; rank = int(os.environ['GRADRED_LOCAL_RANK'])\n"
    return [
        *("-np", str(size), "--launcher", "local", *options),
        *(sys.executable, "-S", "-u", "-c", head + program),
    ]


def test_output_and_success() -> None:
    program = "print('to', os.environ['GRADRED_LOCAL_SIZE']); print('error', file=sys.stderr)"
    done = gradred_run(*local(3, program))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] to 3", "[1] to 3", "[2] to 3"]
    assert sorted(done.stderr.splitlines()) == ["[0] error", "[1] error", "[2] error"]


def test_no_tag_and_input() -> None:
    read, write = os.pipe()
    with started(*local(2, "print(sys.stdin.read().upper())", "--no-tag"), stdin=read) as process:
        os.close(read)
        os.write(write, b"to rank 0")
        os.close(write)
        out, err = process.communicate(timeout=30)
    assert sorted(out.splitlines()) == ["", "TO RANK 0"]
    assert (process.returncode, err) == (0, "")


def test_variables_and_threads() -> None:
    program = (
        "print([os.environ[n] for n in ('ANSWER', 'OMP_NUM_THREADS')], "
        "len(os.sched_getaffinity(0)))"
    )
    done = gradred_run(*local(1, program, "-x", "ANSWER=42", "-x", "OMP_NUM_THREADS=3"))
    assert done.stdout == f"[0] ['42', '3'] {len(os.sched_getaffinity(0))}\n"


def test_first_bad_exit_code() -> None:
    """The others have the grace time to end by themselves, and then are ended."""
    done = gradred_run(*local(3, "time.sleep(60 * (rank != 1)); sys.exit(3)", "--grace", "0.3"))
    assert done.returncode == 3
    assert done.stderr == "gradred run: the job ended because rank 1 ended by exit code 3\n"


def test_folders_of_killed_jobs_are_swept(tmp_path: Path) -> None:
    """Those in use stay: of a living job, and while supervisors of a killed one go on."""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    run = [sys.executable, "-m", "gradred.launch", "run"]
    program = "print(os.environ['GRADRED_JOB_DIR'], flush=True); time.sleep(60)"
    killed, living = (
        subprocess.Popen([*run, *local(1, program, "--no-tag")], env=environ, stdout=-1, text=True)
        for _ in range(2)
    )
    try:
        folders = [job.stdout.readline().strip() for job in (killed, living)]
        killed.kill()
        killed.wait()
        end = time.monotonic() + 10
        while os.path.exists(folders[0]) and time.monotonic() < end:
            assert subprocess.run([*run, *local(1, "pass")], env=environ).returncode == 0
        assert [os.path.exists(folder) for folder in folders] == [False, True]
    finally:
        living.terminate()
        living.wait()
    assert os.listdir(tmp_path) == []


def test_others_end_by_themselves() -> None:
    """A rank that ends well while others go on ends nothing."""
    program = (
        "while rank and not os.path.exists(os.environ['GRADRED_JOB_DIR'] + '/rank-0'): pass\n"
        "print('done')"
    )
    done = gradred_run(*local(2, program))
    assert (done.returncode, done.stdout) == (0, "[0] done\n[1] done\n")


def test_command_not_executable(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("not a program")
    program.chmod(0o755)
    done = gradred_run("-np", "2", "--launcher", "local", "--grace", "0.3", str(program))
    assert done.returncode == 127
    assert f"[0] gradred run: cannot start {program}: Exec format error\n" in done.stderr


NOTE = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
note = os.environ['GRADRED_JOB_DIR'] + '/rank-1'
while not os.path.exists(note):
    time.sleep(0.01)
print('rank 1 ended by', open(note).read().strip())
time.sleep(60)
"""


def test_survivors_learn_of_a_killed_rank() -> None:
    done = gradred_run(*local(3, NOTE, "--grace", "1"))
    assert done.returncode == 128 + signal.SIGKILL
    text = "rank 1 ended by signal 9 (SIGKILL)"
    assert sorted(done.stdout.splitlines()) == [f"[0] {text}", f"[2] {text}"]
    assert done.stderr == f"gradred run: the job ended because {text}\n"


def test_the_cause_is_told_from_other_ends() -> None:
    """An exception comes before an end without one, that before what was lost with another rank."""
    lost = _End(1, 0, "exit code 1", "consequence", "Abandoned", 40)
    ended = _End(2, 1, "signal 15 (SIGTERM)", "", "", 0)
    later = _End(3, 2, "exit code 1", "cause", "ValueError", 30)
    cause = _End(4, 3, "exit code 1", "cause", "ValueError", 20)
    assert _first([lost, ended, later, cause]) is cause
    assert _first([lost, ended]) is ended
    assert _first([lost]) is lost


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_handed_on_once(number: signal.Signals) -> None:
    program = (
        f"signals = {{{number:d}}}; signal.pthread_sigmask(signal.SIG_BLOCK, signals)\n"
        "print('ready'); print('got', int(signal.sigwait(signals)))\n"
        "again = signal.sigtimedwait(signals, 0.3); again and print('again')"
    )
    with started(*local(2, program)) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert sorted(out.splitlines()) == [f"[0] got {number:d}", f"[1] got {number:d}"]
    assert process.returncode == (0 if number == signal.SIGUSR1 else 128 + number)


INTERRUPTED = """
import os, sys, time
import numpy as np
import gradred
gradred.init()
print("ready", flush=True)
try:
    time.sleep(60) if gradred.rank() == 1 else gradred.allreduce(np.ones(3), name="waits")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["launcher", "all"])
def test_an_interrupt_is_one_on_all_ranks(send: Callable[[int, int], None]) -> None:
    """Also on ranks that wait for one that ends first. A trace of rank 0, a line of others."""
    program = (sys.executable, "-c", INTERRUPTED)
    with started("-np", "3", "--launcher", "local", *program) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(3)) == [
            f"[{rank}] ready\n" for rank in range(3)
        ]
        send(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert sorted(out.splitlines()) == [f"[{rank}] interrupted" for rank in range(3)], err
    assert err.count("Traceback") == 1 and "Abandoned" not in err, err
    lines = err.splitlines()
    assert "[0] KeyboardInterrupt" in lines, err
    assert {f"[{rank}] KeyboardInterrupt at <string>:8" for rank in (1, 2)} <= set(lines), err
    assert lines[-1] == "gradred run: the job was ended by signal 2 (SIGINT)", err


def test_deaf_ranks_are_killed() -> None:
    """Also what they have started, in a session of its own."""
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork() or (os.setsid(), os.fork())\n"
        "os.write(1, b'ready\\n'); time.sleep(60)"
    )
    with started(*local(1, program, "--grace", "0.3")) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["[0] ready\n"] * 3
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - start < 10


def test_timeout() -> None:
    done = gradred_run(*local(2, "time.sleep(60)", "--timeout", "0.5", "--grace", "0.5"))
    assert done.returncode == 124
    assert "gradred run: no end within 0.5 s: ending the job" in done.stderr


def test_launcher_is_killed() -> None:
    with started(*local(2, "print('ready'); time.sleep(60)")) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
        process.kill()


def test_output_is_closed() -> None:
    with started(*local(2, "while True: print('more')")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(20)
    assert process.returncode == 128 + signal.SIGPIPE


def test_output_on_a_full_disk() -> None:
    endless = local(2, "while True: print('more')")
    with open("/dev/full", "w") as full, started(*endless, stdout=full) as process:
        text = process.communicate(timeout=20)[1]
    assert text.count("cannot write the ranks' output: No space left on device") == 1, text
    assert "Traceback" not in text
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("kind", STAND_INS)
def test_stand_ins(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is recorded, the ranks are started, and a killed rank is told to the others."""
    stand_in = STAND_INS[kind]
    path = stand_in.write(tmp_path)
    for name, value in stand_in.environ.items():
        monkeypatch.setenv(name, value)
    head = f"import os, signal, sys, time; rank = int(os.environ['{stand_in.rank_variable}'])\n"
    words = ["-np", "3", "--launcher", str(path), "--grace", "1", *stand_in.options]
    done = gradred_run(*words, sys.executable, "-S", "-u", "-c", head + NOTE)
    assert done.returncode == 128 + signal.SIGKILL
    text = "rank 1 ended by signal 9 (SIGKILL)"
    assert sorted(done.stdout.splitlines()) == [f"[0] {text}", f"[2] {text}"]
    assert done.stderr == f"gradred run: the job ended because {text}\n"
    line, files = recorded(tmp_path)
    for word in line:
        if word.startswith("/"):
            line[line.index(word)] = "FILE"
        elif word.startswith("--mpi="):
            line[line.index(word)] = "--mpi=MPI"
    assert " ".join(line) == LINES[kind]
    if kind == "jsrun, file":
        assert files[0].count("rank: ") == 3 and "hostname: node1 ;" in files[0]


@pytest.mark.skipif(find_mpirun() is None, reason="there is no mpirun")
def test_kill_contract_with_mpi() -> None:
    """A plain MPI program: the runtime lets the survivors live until they have read the note."""
    pytest.importorskip("mpi4py")
    program = (
        "import os, signal, sys, time\nfrom mpi4py import MPI\n"
        f"MPI.COMM_WORLD.Barrier()\nrank = MPI.COMM_WORLD.rank\n{NOTE}"
    )
    files = set(os.listdir(SHM))
    start = time.monotonic()
    done = gradred_run("-np", "3", "--grace", "2", sys.executable, "-u", "-c", program)
    assert time.monotonic() - start < 20
    assert done.returncode == 128 + signal.SIGKILL
    text = "rank 1 ended by signal 9 (SIGKILL)"
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("[")) == [
        f"[0] {text}",
        f"[2] {text}",
    ]
    assert f"gradred run: the job ended because {text}\n" in done.stderr
    end = time.monotonic() + 3  # another job's files count until they are mapped
    while left_in_shm(files) and time.monotonic() < end:
        time.sleep(0.02)
    assert left_in_shm(files) == set()


@pytest.mark.skipif(find_mpirun() is None, reason="there is no mpirun")
def test_success_with_mpi_prints_nothing() -> None:
    done = gradred_run("-np", "2", sys.executable, "-S", "-c", "print(1)")
    assert sorted(done.stdout.splitlines()) == ["[0] 1", "[1] 1"]
    assert (done.returncode, done.stderr) == (0, "")
