"""Pytest plugin: tests that run inside the ranks of a job.

``@pytest.mark.ranks(2, 3, deadline=60)`` names the sizes of job a test is for; with no size it is
for 2. A test without the mark is for one process. In a job of N ranks every rank runs the same
tests in the same order. The ranks meet between tests; a test that fails on one rank fails on all,
and rank 0 reports what each rank printed. A test that does not return within its deadline (seconds)
leaves the stacks of all threads of every rank and ends the job.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.config import create_terminal_writer
from _pytest.runner import runtestprotocol

from harness.job import Job, JobError

_DEADLINE_S = 60.0
_ALONE_S = 300.0  # of a test without the mark
_MEET_S = 10.0  # longer than the others need to say that they ran out of time


def mark_of(item: pytest.Item) -> tuple[tuple[int, ...], float]:
    """The sizes of job a test is for, and its deadline in seconds."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return (1,), _ALONE_S
    return tuple(mark.args) or (2,), float(mark.kwargs.get("deadline", _DEADLINE_S))


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a test on one rank, as it travels to the others."""

    when: str
    outcome: str
    text: str
    sections: list[tuple[str, str]]

    @classmethod
    def of(cls, report: pytest.TestReport) -> PhaseReport:
        text = report.longreprtext
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        return cls(report.when or "", report.outcome, text, list(report.sections))


def merge(mine: pytest.TestReport, ranks: list[PhaseReport | None]) -> None:
    """Makes `mine` what all ranks say of this phase: failed unless all did the same."""
    outcomes = ["missing" if r is None else r.outcome for r in ranks]
    if "failed" not in outcomes and len(set(outcomes)) == 1:
        return
    mine.outcome = "failed"
    bad = [rank for rank, outcome in enumerate(outcomes) if outcome == "failed"]
    parts = [f"failed on ranks {bad}" if bad else f"not the same on all ranks: {outcomes}"]
    for rank, report in enumerate(ranks):
        parts.append(f"{'=' * 20} rank {rank}: {outcomes[rank]} {'=' * 20}")
        if report is not None:
            parts.append(report.text)
            for title, text in report.sections:
                parts.append(f"{'-' * 10} rank {rank}: {title} {'-' * 10}\n{text.rstrip()}")
    mine.longrepr = "\n".join(part for part in parts if part)
    mine.sections = []


class RanksPlugin:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.broken = ""  # why the ranks cannot meet any more
        self.stderr = os.fdopen(os.dup(2), "w")  # not captured

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        try:
            self.job.open()
        except JobError as error:
            self._leave(str(error))
        if self.job.size > 1:  # apart from the other ranks' numbered folders, and gone with the job
            folder = os.path.join(os.environ["GRADRED_JOB_DIR"], f"pytest-{self.job.rank}")
            os.mkdir(folder)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        if self.job.rank != 0:  # rank 0 alone reports
            reporter = session.config.pluginmanager.getplugin("terminalreporter")
            assert reporter is not None
            nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
            reporter._tw = create_terminal_writer(session.config, nowhere)

    @pytest.hookimpl(tryfirst=True)
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if "run_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("launch")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        chosen = [item for item in items if self.job.size in mark_of(item)[0]]
        left = [item for item in items if self.job.size not in mark_of(item)[0]]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = chosen

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = [item.nodeid for item in session.items]
        lists = self._meet(names, "the list of tests", 120.0)
        for rank, theirs in enumerate(lists):
            if theirs == lists[0]:
                continue
            first = next((a for a in zip(lists[0], theirs, strict=False) if a[0] != a[1]), None)
            self._leave(f"rank 0 runs {len(lists[0])} tests, rank {rank} {len(theirs)}: {first}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        _, deadline_s = mark_of(item)
        # Not a thread of Python: a test may hold the interpreter's lock in a call that hangs.
        faulthandler.dump_traceback_later(deadline_s, exit=True, file=self.stderr)
        try:
            return None if self.job.size == 1 else self._run(item, nextitem, deadline_s)
        finally:
            if self.job.size > 1:
                faulthandler.cancel_dump_traceback_later()

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None, deadline_s: float) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        mine = {report.when or "": PhaseReport.of(report) for report in reports}
        if "call" not in mine:
            self._meet(mine["setup"].outcome, f"the start of {item.nodeid}", deadline_s + _MEET_S)
        ranks: list[dict[str, PhaseReport]]
        try:
            ranks = self.job.exchange(mine, f"the end of {item.nodeid}", deadline_s + _MEET_S)
        except JobError as error:
            self.broken = str(error)
            if self.job.rank != 0:
                self._say_failures(list(mine.values()))
                self._leave(self.broken)
            # Rank 0 still reports what it knows.
            item.session.shouldstop = self.broken
            lost = PhaseReport("call", "failed", self.broken, [])
            ranks = [mine, *[{"call": lost}] * (self.job.size - 1)]
            reports = [report for report in reports if report.when == "call"]
        for report in reports:
            merge(report, [theirs.get(report.when or "") for theirs in ranks])
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """No rank starts a test whose set-up failed on another."""
        if self.job.size > 1:
            what = f"the start of {item.nodeid}"
            outcomes = self._meet("passed", what, mark_of(item)[1] + _MEET_S)
            if set(outcomes) != {"passed"}:
                pytest.fail(f"set-up on the ranks: {', '.join(outcomes)}", pytrace=False)
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """No rank leaves while another still talks to it."""
        if self.job.size > 1 and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # no test is for a job of this size
        if self.job.size > 1 and not self.broken:
            self._meet(None, "the end of the session", 120.0)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self.broken:
            self._leave(self.broken)

    def _meet(self, mine: Any, what: str, deadline_s: float) -> list[Any]:
        try:
            return self.job.exchange(mine, what, deadline_s)
        except JobError as error:
            self._leave(str(error))

    def _say_failures(self, reports: list[PhaseReport]) -> None:
        for report in reports:
            if report.outcome == "failed":
                print(report.text, file=self.stderr)
                for title, text in report.sections:
                    print(f"--- {title}\n{text}", file=self.stderr)

    def _leave(self, why: str) -> NoReturn:
        # Not pytest.exit: threads of a job that is out of step may never end.
        print(f"FAILED: rank {self.job.rank} leaves the tests: {why}", file=self.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest) -> Job:
    """The job the test runs in: rank, size, barrier(), exchange(object) -> list."""
    plugin = request.config.pluginmanager.getplugin("gradred-ranks")
    assert isinstance(plugin, RanksPlugin)
    return plugin.job


@pytest.fixture(scope="session")
def rank(job: Job) -> int:
    return job.rank


@pytest.fixture(scope="session")
def size(job: Job) -> int:
    return job.size


@pytest.fixture
def shared_dir(job: Job, tmp_path: Path) -> Iterator[Path]:
    """One empty folder, the same on all ranks; gone when all have left the test."""
    folder = job.exchange(tmp_path, "shared_dir")[0]
    yield folder
    job.barrier("the end of shared_dir")
