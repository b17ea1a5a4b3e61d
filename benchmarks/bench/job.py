"""Groups of rank processes that stay alive side by side and take turns.

A contestant is a job of its own: its libraries, its settings, its MPI. While one runs, the ranks of
the others are stopped, so that a thread that polls takes no core from it.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from gradred.launch.processes import die_with_parent

__all__ = ["Job", "JobError", "Jobs", "alternate"]

_BENCHMARKS = Path(__file__).parents[1]
_START_S = 120.0

# One thread of compute for each rank, as if its core were all it has.
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}


class JobError(Exception):
    """A rank failed or did not answer; says which, and what was printed."""


class Job:
    """Ranks that were started and wait to be told what to do."""

    def __init__(
        self,
        name: str,
        size: int,
        env: Mapping[str, str] | None = None,
        launcher: str = "auto",
        bind: bool = True,
    ) -> None:
        """Starts ``size`` ranks and waits until they are there.

        env: for the ranks, on top of this process's. launcher: of ``gradred run``. bind: each rank
        to its share of the cores, if there is a core for each.
        """
        self.name, self.size = name, size
        self.pids: list[int] = []
        self._connections: list[Connection] = []
        self._stopped = False
        self._folder = tempfile.TemporaryDirectory(prefix="gradred-bench-")
        socket = os.path.join(self._folder.name, "socket")
        shared = f"/dev/shm/gradred-bench-{secrets.token_hex(6)}"
        self._log = Path(self._folder.name) / "output"
        environ = {
            **os.environ,
            **_THREADS,
            "BENCH_SOCKET": socket,
            "BENCH_SHARED": shared,
            "BENCH_SIZE": str(size),
            **(env or {}),
        }
        path = [str(_BENCHMARKS.parent), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = [sys.executable, "-m", "gradred.launch", "run", "-np", str(size), "--no-tag"]
        command += ["--launcher", launcher, "--bind", "core" if bind else "none", "--grace", "2"]
        command += [sys.executable, "-u", str(_BENCHMARKS / "bench" / "rank.py")]
        with Listener(socket, "AF_UNIX", backlog=size) as listener, open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
            try:
                self._accept(listener)
            except BaseException:
                self.close()
                raise
            finally:
                Path(shared).unlink(missing_ok=True)

    def _accept(self, listener: Listener) -> None:
        end = time.monotonic() + _START_S
        listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        connections: list[Connection] = []
        while len(connections) < self.size:
            try:
                connections.append(listener.accept())
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise JobError(f"{self.name}: ranks did not start\n{self._tail()}") from None
        hellos = {}
        for connection in connections:
            if not connection.poll(max(0.0, end - time.monotonic())):
                raise JobError(f"{self.name}: a rank did not begin\n{self._tail()}")
            try:
                rank, pid = connection.recv()
            except EOFError:
                raise JobError(f"{self.name}: a rank did not begin\n{self._tail()}") from None
            hellos[rank] = (connection, pid)
        self._connections = [hellos[rank][0] for rank in range(self.size)]
        self.pids = [hellos[rank][1] for rank in range(self.size)]

    def call(self, target: str, timeout_s: float = 120.0, **arguments: Any) -> list[Any]:
        """Calls "module.function" on all ranks at once; the results in rank order.

        Raises JobError if a rank raises, ends, or takes longer than ``timeout_s``.
        """
        return self.call_each(target, [arguments] * self.size, timeout_s)

    def call_each(
        self, target: str, arguments: Sequence[Mapping[str, Any]], timeout_s: float = 120.0
    ) -> list[Any]:
        """The same with arguments of its own for each rank."""
        module, _, function = target.rpartition(".")
        for connection, given in zip(self._connections, arguments, strict=True):
            connection.send((module, function, given))
        end = time.monotonic() + timeout_s
        results, failed = [], ""
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, end - time.monotonic())):
                    failed = failed or f"rank {rank}: no answer to {target} in {timeout_s:g} s"
                    continue
                good, value = connection.recv()
            except (EOFError, ConnectionError):
                failed = failed or f"rank {rank} has ended"
                continue
            if not good:
                failed = failed or f"rank {rank}: {target}:\n{value}"
                end = min(end, time.monotonic() + 10.0)  # the others may wait for it in vain
            results.append(value)
        if failed:
            raise JobError(f"{self.name}: {failed}\n{self._tail()}")
        return results

    def stop(self) -> None:
        """Stops all processes of the job. Only between calls."""
        if not self._stopped:
            self._send(signal.SIGSTOP)
            while not all(map(_is_stopped, self.pids)):
                time.sleep(1e-4)
            self._stopped = True

    def go_on(self) -> None:
        if self._stopped:
            self._send(signal.SIGCONT)
            self._stopped = False

    def _send(self, number: int) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-30:])

    def close(self) -> None:
        """Ends the ranks, by themselves if they can."""
        self.go_on()
        for connection in self._connections:
            connection.close()
        try:
            self._process.wait(10.0 if self._connections else 0.5)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(15.0)
        self._folder.cleanup()


def _is_stopped(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] in "TtZX"


class Jobs:
    """Jobs that take turns: at most one is awake. Ends all of them as a context manager."""

    def __init__(self) -> None:
        self._all: dict[str, Job] = {}

    def __enter__(self) -> Jobs:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for job in self._all.values():
                stack.callback(job.close)

    def start(self, name: str, *args: Any, **kwargs: Any) -> Job:
        """A new job, stopped. Arguments: see Job."""
        job = Job(name, *args, **kwargs)
        job.stop()
        self._all[name] = job
        return job

    def end(self, name: str) -> None:
        self._all.pop(name).close()

    def __getitem__(self, name: str) -> Job:
        return self._all[name]

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._all.values()))

    @contextmanager
    def turn(self, name: str) -> Iterator[Job]:
        """The job runs, the others do not."""
        job = self._all[name]
        job.go_on()
        try:
            yield job
        finally:
            job.stop()


def alternate(
    names: Sequence[str], rounds: int, block: Callable[[str], Any], seed: int = 0
) -> dict[str, list[Any]]:
    """``rounds`` times one block of each, in a random order: name -> the blocks' results."""
    rng = random.Random(seed)
    results: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in rng.sample(list(names), len(names)):
            results[name].append(block(name))
    return results
