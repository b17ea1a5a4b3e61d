"""Parent of one rank's program: ``supervisor.py OPTIONS COMMAND...``; OPTIONS is JSON, see Options.

Launchers end all ranks as soon as one process of theirs ends badly, before the others can say which
rank was lost and how. So they start this one, which starts the program, and when it ends badly

1. leaves a note "<GRADRED_JOB_DIR>/rank-<r>" ("signal 9 (SIGKILL)", "exit code 3") for survivors,
2. waits until all ranks of this machine have ended, at most a grace time,
3. ends with a code that makes the launcher end the job.

It also binds the rank to its cores and connects the program's output with ``gradred run``. MPI does
not see it: the program inherits environment and descriptors. It imports nothing of gradred and is
run as a file by ``python -S -E``, to be there in tens of milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import NoReturn, TypedDict

# (rank, local rank, local size) as launchers give them to the programs they start; the first that
# says both ranks counts. mpirun in a job of Slurm starts its daemons by srun.
RANK_VARIABLES = (
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("GRADRED_LOCAL_RANK", "GRADRED_LOCAL_RANK", "GRADRED_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
OUTPUT_SOCKET = "output.sock"
MESSAGES = (signal.SIGUSR1, signal.SIGUSR2)  # to the ranks, such as "write a checkpoint"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *MESSAGES)
_PR_SET_PDEATHSIG = 1


class Options(TypedDict):
    grace_s: float  # how long a rank that ended badly waits for the others
    bind: str  # "core", "none", or "launcher": it has bound this process already


class Place(TypedDict):
    rank: int
    local_rank: int
    local_size: int


def find_place(environ: Mapping[str, str]) -> Place:
    for rank, local_rank, local_size in RANK_VARIABLES:
        if rank in environ and local_rank in environ:
            size = environ.get(local_size, "1")
            return {
                "rank": int(environ[rank]),
                "local_rank": int(environ[local_rank]),
                "local_size": tasks_of_node(size, int(environ.get("SLURM_NODEID", 0))),
            }
    return {"rank": int(environ.get("PMI_RANK", 0)), "local_rank": 0, "local_size": 1}


def tasks_of_node(text: str, node: int) -> int:
    """The number for a node in a list such as "4(x2),3": 4 for the first two, 3 for the third."""
    count = "1"
    for part in text.split(","):
        count, _, times = part.partition("(x")
        node -= int(times.rstrip(")") or 1)
        if node < 0:
            break
    return int(count)


def describe(code: int) -> str:
    """How a process ended; `code` is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def physical_cores(cpus: set[int], root: str = "/sys/devices/system/cpu") -> list[list[int]]:
    """The CPUs grouped by core, in order; one whose siblings are not known is its own core."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        try:
            with open(f"{root}/cpu{cpu}/topology/thread_siblings_list") as file:
                siblings = file.read().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    return list(cores.values())


def share_of_cores(cores: list[list[int]], local_rank: int, local_size: int) -> list[list[int]]:
    """The cores of one of `local_size` ranks: equally many each; none when there are too few."""
    each = len(cores) // local_size
    return cores[local_rank * each : (local_rank + 1) * each]


def bind(place: Place, binding: str) -> None:
    """Pins this process to its share of the cores, and tells OpenMP and TensorFlow their number."""
    cores = physical_cores(os.sched_getaffinity(0))
    share = share_of_cores(cores, place["local_rank"], place["local_size"])
    mine = cores if binding == "launcher" else share
    if binding == "core" and mine:
        try:
            os.sched_setaffinity(0, {cpu for core in mine for cpu in core})
        except OSError:
            pass  # forbidden by a sandbox: unbound works as well
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        os.environ.setdefault(name, str(max(1, len(mine))))


def _connect(folder: str) -> socket.socket | None:
    """A connection with `gradred run`; None on another machine, or when it was killed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.path.join(folder, OUTPUT_SOCKET))
    except OSError:
        connection.close()
        return None
    return connection


def send_output(folder: str, rank: int) -> list[int] | None:
    """Gives `gradred run` the reading ends of two pipes and returns the writing ends.

    None when it is on another machine: then the output goes through mpirun.
    """
    connection = _connect(folder)
    if connection is None:
        return None
    out, err = os.pipe(), os.pipe()
    socket.send_fds(connection, [b"%d\n" % rank], [out[0], err[0]])
    connection.recv(1)  # until they are taken
    connection.close()
    os.close(out[0])
    os.close(err[0])
    return [out[1], err[1]]


def hold(folder: str) -> None:
    """Until this process ends nobody sweeps the folder: see gradred/launch/folder.py."""
    descriptor = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def in_foreground() -> bool:
    """A Ctrl-C at the terminal reaches this process and its children by itself."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _run_program(command: list[str], output: list[int] | None) -> NoReturn:
    """In the child: becomes the program, which is killed when the supervisor is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if output:
        os.dup2(output[0], 1)
        os.dup2(output[1], 2)
        for descriptor in output:
            os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python found them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        text = f"gradred run: cannot start {command[0]}: {error.strerror}\n"
        os.write(2, os.fsencode(text))
        os._exit(127)


def _leave_note(folder: str, rank: int, text: str) -> None:
    name = os.path.join(folder, f"rank-{rank}")
    with open(name + ".new", "w") as file:
        file.write(text + "\n")
    os.rename(name + ".new", name)


def _all_ended(folder: str, local_size: int) -> bool:
    notes = [n for n in os.listdir(folder) if n.startswith("rank-") and "." not in n]
    return len(notes) >= local_size


def main() -> int:
    options: Options = json.loads(sys.argv[1])
    command = sys.argv[2:]
    place = find_place(os.environ)
    os.environ["GRADRED_JOB_RANK"] = str(place["rank"])  # to the program: see gradred/uncaught.py
    folder = os.environ["GRADRED_JOB_DIR"]
    os.makedirs(folder, mode=0o700, exist_ok=True)  # it is new on a machine without `gradred run`
    hold(folder)
    bind(place, options["bind"])
    output = send_output(folder, place["rank"])

    # Launchers signal process groups, ours and the program's; it gets what is handed on, and once.
    apart = not in_foreground()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if apart:
        with contextlib.suppress(OSError):  # the other of the two has done it, and gone on
            os.setpgid(child, 0)
    if child == 0:
        _run_program(command, output)
    for descriptor in output or ():
        os.close(descriptor)
    asked_to_end = False

    def forward(number: int, _: object) -> None:
        nonlocal asked_to_end
        asked_to_end |= number == signal.SIGTERM
        if apart and number not in MESSAGES:  # those are for the program, not for its workers
            os.killpg(child, number)
        elif number != signal.SIGINT or not in_foreground():
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # Once it is reaped, its pid may be another's: no forwarding from here on.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _leave_note(folder, place["rank"], describe(code))
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

    end = time.monotonic() + (0 if code == 0 or asked_to_end else options["grace_s"])
    while not (last := _all_ended(folder, place["local_size"])) and time.monotonic() < end:
        time.sleep(0.05)
    if last and _connect(folder) is None:  # no launcher here that does it
        shutil.rmtree(folder, ignore_errors=True)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    os._exit(main())
