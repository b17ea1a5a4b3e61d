"""The whole plan of tests: ``python tests/run.py --native BUILD [--old-python PYTHON] [PART...]``.

Prints what each part prints, then a table of times and one line "N passed, N failed" over all.
Parts that leave cores idle run two at a time; what each prints is shown when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).parents[1]
# One thread a rank: several ranks share the cores.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
}
_ARRAYS = ["tests/mpi"]  # no TensorFlow: quick to start
_LOCAL = ["tests/multiproc"]  # ranks started without MPI
_FRAMEWORKS = ["tests/tensorflow", "tests/keras", "tests/diff", "tests/pde", "tests/examples"]
# Here tests that start jobs are of the library, elsewhere of the launcher and of programs.
_JOBS = [*_ARRAYS, *_LOCAL, "tests/tensorflow", "tests/keras", "tests/diff", "tests/pde"]
_NO_TESTS = 5  # pytest's exit code when none were chosen


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


@dataclass
class Part:
    name: str
    command: list[str]
    count: Callable[[str], Counts]
    limit_s: float
    beside: bool = False  # another such part may run at the same time
    environment: dict[str, str] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0


def count_pytest(text: str) -> Counts:
    """The counts of pytest's last line; an error in set-up or tear-down is a failure."""
    lines = re.findall(
        r"^=* ?(\d+ (?:passed|failed|error|skipped|deselected).*) in [\d.]+s", text, re.M
    )
    if not lines:
        return Counts()
    numbers = {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+?)s?\b", lines[-1])}
    return Counts(
        numbers.get("passed", 0),
        numbers.get("failed", 0) + numbers.get("error", 0),
        numbers.get("skipped", 0),
    )


def count_native(text: str) -> Counts:
    """The counts of all C++ programs; one that printed none has failed."""
    counts = Counts()
    for passed, failed in re.findall(r"^\d+: (\d+) passed, (\d+) failed", text, re.M):
        counts.add(Counts(int(passed), int(failed)))
    ended = re.search(r"(\d+) tests failed out of", text)
    if ended and counts.failed == 0:
        counts.failed = int(ended[1])
    return counts


def failed_programs(text: str) -> str:
    """What the failed C++ programs printed, and ctest's closing lines."""
    failed = re.findall(r"Test +#(\d+): .*\*\*\*", text)
    lines = [line for line in text.splitlines() if line.partition(": ")[0] in failed]
    return "\n".join([*lines, *text.splitlines()[-12:]])


def end(process: subprocess.Popen[bytes], over: threading.Event) -> None:
    """Ends a part that takes too long, also what outlives its first process."""
    while not over.is_set():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        over.wait(10)


def run_part(part: Part, folder: Path, quiet: bool) -> str:
    """Runs one part in its own session and fills in its counts; returns what is not shown yet.

    quiet: nothing is shown. Else output is shown as it comes, of the C++ programs when they fail.
    """
    title = f"\n=== {part.name}: {' '.join(part.command)}\n"
    start = time.monotonic()
    environment = {**os.environ, **_ENVIRONMENT, **part.environment}
    environment["TMPDIR"] = str(folder)  # TensorFlow leaves files of traced functions when killed
    environment["PYTEST_DEBUG_TEMPROOT"] = str(folder / part.name)  # pytest clears what it finds
    (folder / part.name).mkdir()
    native = part.count is count_native  # each of its lines is the name of a test or of a program
    if not quiet:
        print(title, end="", flush=True)
    process = subprocess.Popen(
        part.command,
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    over = threading.Event()
    timer = threading.Timer(part.limit_s, end, (process, over))
    timer.daemon = True
    timer.start()
    lines = []
    for raw in process.stdout:
        lines.append(raw.decode(errors="replace"))
        if not quiet and not native:
            print(lines[-1], end="", flush=True)
    code = process.wait()
    over.set()
    timer.cancel()
    part.seconds = time.monotonic() - start
    text = "".join(lines)
    part.counts = part.count(text)
    rest = title + ("" if native else text) if quiet else ""
    if native and code != 0:
        rest += failed_programs(text) + "\n"
    if code not in (0, _NO_TESTS) and part.counts.failed == 0:
        part.counts.failed = 1
        rest += f"FAILED: {part.name} ended with exit code {code}\n"
    return rest


def run_beside(parts: list[Part], folder: Path) -> None:
    """Runs parts two at a time, in their order."""
    left = iter(parts)
    lock = threading.Lock()

    def lane() -> None:
        while True:
            with lock:
                part = next(left, None)
            if part is None:
                return
            try:
                text = run_part(part, folder, quiet=True)
            except Exception:
                part.counts.failed += 1
                text = f"FAILED: {part.name}\n{traceback.format_exc()}"
            with lock:
                print(text, end="", flush=True)

    lanes = [threading.Thread(target=lane, daemon=True) for _ in range(2)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()


def pytest_part(
    name: str, python: str, where: list[str], marks: str, limit_s: float, *, beside: bool = False
) -> Part:
    options = ["-q", "-p", "no:cacheprovider", "--durations=5", "--durations-min=5"]
    command = [python, "-m", "pytest", *options, "-m", marks, *where]
    return Part(name, command, count_pytest, limit_s, beside)


def ranks_part(
    name: str,
    python: str,
    size: int,
    where: list[str],
    *,
    local: bool = False,
    marks: str = "ranks",
) -> Part:
    """One job of `size` ranks in which pytest runs on all of them."""
    part = pytest_part(name, python, where, marks, 1800.0)
    launcher = "local" if local else "auto"
    launch = [python, "-m", "gradred.launch", "run", "-np", str(size), "--no-tag"]
    part.command = [*launch, "--launcher", launcher, "--bind", "none", *part.command]
    return part


def with_rank_tests(where: list[str]) -> list[str]:
    """The folders in which a test runs inside the ranks."""
    return [
        folder
        for folder in where
        if any("mark.ranks" in path.read_text() for path in (_ROOT / folder).glob("test_*.py"))
    ]


def plan(native: str, old_python: str | None) -> list[Part]:
    python = sys.executable
    ctest = shutil.which("ctest", path=os.path.dirname(python)) or "ctest"
    others = [f"--ignore={folder}" for folder in _JOBS]
    parts = [
        Part("native", [ctest, "--test-dir", native, "-j2", "-V"], count_native, 1800.0),
        pytest_part("launch", python, ["tests", *others], "launch", 1800.0, beside=True),
        pytest_part("jobs", python, _JOBS, "launch", 1800.0, beside=True),
        pytest_part("unit", python, ["tests"], "not launch", 1800.0, beside=True),
    ]
    arrays, local = with_rank_tests(_ARRAYS), with_rank_tests(_LOCAL)
    frameworks = with_rank_tests(_FRAMEWORKS)
    for size in (2, 3, 4):
        if arrays:
            parts.append(ranks_part(f"mpi-{size}", python, size, arrays))
        if local:
            parts.append(ranks_part(f"local-{size}", python, size, local, local=True))
        if frameworks:
            parts.append(ranks_part(f"tensorflow-{size}", python, size, frameworks))
    if old_python is not None and frameworks:
        where = [folder for folder in frameworks if folder != "tests/examples"]
        parts.append(ranks_part("oldest-2", old_python, 2, where, marks="ranks and smoke"))
    if old_python is not None:
        horovodrun = shutil.which("horovodrun", path=os.path.dirname(old_python))
        if horovodrun is not None:
            part = next(part for part in parts if part.name == "launch")
            part.environment["GRADRED_TEST_HOROVODRUN"] = horovodrun
    for part in parts:
        part.environment["GRADRED_TEST_NATIVE"] = str((_ROOT / native).resolve())
        part.environment["PYTHONPATH"] = str(_ROOT)
    return parts


def table(parts: list[Part]) -> str:
    rows = ["", f"{'part':<16}{'seconds':>9}{'passed':>8}{'failed':>8}{'skipped':>9}"]
    for part in parts:
        c = part.counts
        rows.append(f"{part.name:<16}{part.seconds:>9.1f}{c.passed:>8}{c.failed:>8}{c.skipped:>9}")
    rows.append(f"{'all':<16}{sum(part.seconds for part in parts):>9.1f}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs all tests.")
    parser.add_argument("--native", default="build/native", help="folder of the built C++ tests")
    parser.add_argument("--old-python", help="Python with the oldest TensorFlow")
    parser.add_argument("parts", nargs="*", help="names of parts to run; none: all")
    arguments = parser.parse_args()
    old = arguments.old_python
    if old is not None and not os.access(old, os.X_OK):
        print(f"TensorFlow 2.15 with Keras 2 is not tested: there is no {old}")
        old = None
    parts = plan(arguments.native, str(Path(old).absolute()) if old else None)
    if arguments.parts:
        unknown = set(arguments.parts) - {part.name for part in parts}
        if unknown:
            parser.error(
                f"no part {', '.join(unknown)}; there are {', '.join(p.name for p in parts)}"
            )
        parts = [part for part in parts if part.name in arguments.parts]
    total = Counts()
    with tempfile.TemporaryDirectory(prefix="gradred-tests-") as folder:
        run_beside([part for part in parts if part.beside], Path(folder))
        for part in parts:
            if not part.beside:
                print(run_part(part, Path(folder), quiet=False), end="", flush=True)
            total.add(part.counts)
    print(table(parts))
    print(f"{total.passed} passed, {total.failed} failed")
    return 0 if total.failed == 0 and total.passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
