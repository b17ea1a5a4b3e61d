"""``gradred run``: starts a job, brings its output together, and ends it as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from gradred.launch import folder, launchers, local, mpirun, processes
from gradred.launch.errors import UsageError
from gradred.launch.hosts import Host
from gradred.launch.output import Output
from gradred.launch.supervisor import MESSAGES, OUTPUT_SOCKET, describe, in_foreground

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_TIMED_OUT = 124  # as timeout(1)
# When to look for files that MPICH leaves when ranks are killed, in seconds after the start. It
# makes them when a rank initialises MPI; Open MPI's launcher removes its own.
_LOOK_FOR_FILES_S = (0.3, *range(1, 20), 60, 600)


@dataclass(frozen=True)
class RunOptions:
    size: int
    command: list[str]
    hosts: list[Host] = field(default_factory=list)
    launcher: str = "auto"  # one of launchers.NAMES, or the path of one
    launcher_words: list[str] = field(default_factory=list)  # further ones of its line
    cores: int | None = None  # of each rank, under srun and jsrun
    gpus: int = 0  # of each rank, under srun and jsrun
    resources: Literal["sets", "file"] = "sets"  # how jsrun is told of them
    bind: str = "core"  # core, none
    tag: bool = True
    variables: dict[str, str] = field(default_factory=dict)  # set for the ranks
    timeout_s: float | None = None  # of the whole job
    grace_s: float = 5.0  # from a rank's end, or a signal, to the end of the job
    verbose: bool = False


def say(text: str) -> None:
    print(f"gradred run: {text}", file=sys.stderr, flush=True)


def check_command(command: Sequence[str]) -> None:
    if shutil.which(command[0]) is None:
        raise UsageError(f"command not found: {command[0]}")


class _End(NamedTuple):
    """How a rank ended."""

    time_ns: int
    rank: int
    how: str  # describe()
    role: str  # of its uncaught exception: "cause", "consequence" of another rank's end; "" if none
    error: str  # that exception
    raised_ns: int  # when it was told

    @property
    def code(self) -> int:
        """Of the exit; 128 + number for a signal."""
        number = int(self.how.removeprefix("exit code ").removeprefix("signal ").split()[0])
        return number + (128 if self.how.startswith("signal") else 0)

    @property
    def because(self) -> str:
        return f": {self.error:.300}" if self.error else ""


def _first(failed: Sequence[_End]) -> _End:
    """The end that was the cause of the others, of a list in the order of ends.

    Ranks that lost another one may be gone before that one is, and those without an exception may
    have been ended by this launcher.
    """
    order = {"cause": 0, "": 1, "consequence": 2}
    return min(failed, key=lambda end: (order.get(end.role, 1), end.raised_ns))


class JobRun:
    """One job from its start to its end. Used once, by the main thread."""

    def __init__(self, options: RunOptions) -> None:
        check_command(options.command)
        self._options = options
        self._launcher = launchers.choose(options.launcher, options.hosts)
        if self._launcher is None:
            local.check_size(options.size)
        self._foreground = in_foreground()
        self._selector = selectors.DefaultSelector()
        self._folder, self._folder_lock = folder.make()
        self._main_pids: set[int] = set()  # mpirun, or the supervisors
        self._main_code = 0  # the first that was not 0
        self._signals: list[int] = []
        self._kill_at: float | None = None  # the next step of ending the job
        self._next_signal = signal.SIGTERM
        self._by_signal = self._timed_out = False  # why the job ended, when no rank did it
        self._files: set[str] = set()

    def run(self) -> int:
        """Returns the exit code of the rank that ended the job; 128 + number for a signal."""
        processes.become_subreaper()
        output = Output(
            self._selector,
            os.path.join(self._folder, OUTPUT_SOCKET),
            self._options.tag,
            self._output_lost,
        )
        try:
            self._catch_signals()
            self._start()
            self._loop(output)
            self._files |= processes.shared_files(processes.descendants(os.getpid()))
            processes.end_all(os.getpid(), min(self._options.grace_s, 2.0))
            self._drain(output)
            return self._exit_code()
        finally:
            processes.end_all(os.getpid(), 0.0)
            output.close()
            processes.remove_files(self._files)
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._folder_lock)

    # Start.

    def _start(self) -> None:
        options = self._options
        environ = {**mpirun.clean_environment(os.environ), **options.variables}
        environ["GRADRED_JOB_DIR"] = self._folder
        environ["GRADRED_JOB"] = secrets.token_hex(8)
        binds = self._launcher is not None and self._launcher.binds
        bind = "launcher" if binds else options.bind
        settings = json.dumps({"grace_s": options.grace_s, "bind": bind})
        line = [sys.executable, "-S", "-E", str(_SUPERVISOR), settings, *options.command]
        if self._launcher is None:
            self._show_line(line)
            pids = local.start(line, options.size, environ, self._in_child)
            self._main_pids.update(pids)
            return
        job = launchers.Job(
            size=options.size,
            command=line,
            hosts=options.hosts,
            environ=environ,
            exported=options.variables,
            folder=self._folder,
            cores=options.cores,
            gpus=options.gpus,
            resources=options.resources,
            words=options.launcher_words,
        )
        line, more = self._launcher.compose(job)
        environ.update(more)
        self._show_line(line)
        process = subprocess.Popen(line, env=environ, preexec_fn=self._in_child)
        process.returncode = 0  # waited for by pid
        self._main_pids.add(process.pid)

    def _in_child(self) -> None:
        processes.die_with_parent(signal.SIGTERM)
        if not self._foreground:  # what is sent to our process group is handed on, and once
            os.setpgrp()

    def _show_line(self, line: list[str]) -> None:
        if self._options.verbose:
            who = "without MPI" if self._launcher is None else self._launcher.title
            say(f"{self._options.size} ranks, {who}: {' '.join(line)}")

    def _catch_signals(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _n, _f: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *MESSAGES):
            signal.signal(number, lambda n, _f: self._signals.append(n))
        self._selector.register(wake_read, selectors.EVENT_READ, lambda fd: os.read(fd, 4096))

    # While it runs.

    def _loop(self, output: Output) -> None:
        start = time.monotonic()
        leaves_files = self._launcher is not None and self._launcher.leaves_files
        looks = [start + after for after in _LOOK_FOR_FILES_S] if leaves_files else []
        deadline = None if self._options.timeout_s is None else start + self._options.timeout_s
        while self._main_pids:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                say(f"no end within {self._options.timeout_s:g} s: ending the job")
                self._timed_out, deadline = True, None
                self._begin_end(signal.SIGTERM)
            if self._kill_at is not None and now >= self._kill_at:
                self._begin_end(self._next_signal)
            if looks and now >= looks[0]:
                looks.pop(0)
                self._files |= processes.shared_files(processes.descendants(os.getpid()))
            output.show_unfinished()
            times = [t for t in (deadline, self._kill_at, *looks[:1]) if t is not None]
            timeout = min(times) - now if times else None
            if output.waiting:
                timeout = min(0.1, 0.1 if timeout is None else timeout)
            for key, _ in self._selector.select(None if timeout is None else max(0.0, timeout)):
                key.data(key.fd)
            for pid, code in processes.reap():
                self._ended(pid, code)
            while self._signals:
                self._signal(self._signals.pop(0))

    def _ended(self, pid: int, code: int) -> None:
        if pid not in self._main_pids:
            return
        self._main_pids.remove(pid)
        if code != 0 and self._main_code == 0:
            self._main_code = 128 - code if code < 0 else code
            if self._main_pids:  # the supervisor has given the other ranks their time
                self._begin_end(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        """Hands the first on as it is; what comes later hastens the end. Messages end nothing."""
        if number in MESSAGES:
            processes.send(number, self._main_pids)
            return
        if self._main_code == 0:
            self._main_code, self._by_signal = 128 + number, True
        if self._kill_at is not None:
            self._begin_end(self._next_signal)
        elif number == signal.SIGINT and self._foreground and in_foreground():
            self._kill_at = time.monotonic() + self._options.grace_s  # the terminal told everybody
        else:
            self._begin_end(number if number != signal.SIGPIPE else signal.SIGTERM)

    def _output_lost(self, reason: str) -> None:
        if reason and not self._by_signal and signal.SIGPIPE not in self._signals:
            with contextlib.suppress(OSError):  # it may be that output too
                say(f"cannot write the ranks' output: {reason}: ending the job")
        self._signals.append(signal.SIGPIPE)

    def _begin_end(self, number: int) -> None:
        """One step: the signal to what we started, the next one when the grace time is over."""
        self._files |= processes.shared_files(processes.descendants(os.getpid()))
        if number == signal.SIGKILL:
            processes.send(number, processes.descendants(os.getpid()))
        else:
            processes.send(number, self._main_pids)
        self._next_signal = signal.SIGKILL if number == signal.SIGTERM else signal.SIGTERM
        self._kill_at = time.monotonic() + self._options.grace_s

    # The end.

    def _drain(self, output: Output) -> None:
        end = time.monotonic() + 2.0
        while output.open and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                key.data(key.fd)

    def _notes(self) -> list[_End]:
        """Of the ranks of this machine that have ended, in the order of their ends."""
        notes = []
        for path in Path(self._folder).glob("rank-*"):
            rank = path.name.removeprefix("rank-")
            if rank.isdecimal():
                uncaught = path.with_name(path.name + ".exception")  # see gradred/uncaught.py
                role, error, raised_ns = "", "", 0
                if uncaught.exists():
                    role, _, error = uncaught.read_text("utf-8", "replace").partition("\n")
                    raised_ns = uncaught.stat().st_mtime_ns
                ended_ns, how = path.stat().st_mtime_ns, path.read_text().strip()
                notes.append(_End(ended_ns, int(rank), how, role, error.strip(), raised_ns))
        return sorted(notes)

    def _exit_code(self) -> int:
        notes = self._notes()
        if self._options.verbose:
            for end in notes:
                say(f"rank {end.rank}: {end.how}{end.because}")
        if self._timed_out:
            return _TIMED_OUT
        if self._by_signal:
            if self._main_code != 128 + signal.SIGPIPE:
                say(f"the job was ended by {describe(128 - self._main_code)}")
            return self._main_code
        if self._main_code == 0:
            return 0
        failed = [end for end in notes if end.code != 0]
        if not failed:
            return self._main_code
        first = _first(failed)
        say(f"the job ended because rank {first.rank} ended by {first.how}{first.because}")
        return first.code


def run(options: RunOptions) -> int:
    """Runs a job and returns its exit code. Raises UsageError before anything is started."""
    return JobRun(options).run()
