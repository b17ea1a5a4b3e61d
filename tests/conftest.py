"""Marks, fixtures and the job of the tests: see harness/ranks.py and harness/launches.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from harness.job import Job
from harness.launches import run_ranks
from harness.ranks import RanksPlugin, job, rank, shared_dir, size

__all__ = ["job", "rank", "run_ranks", "shared_dir", "size"]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RanksPlugin(Job()), "gradred-ranks")


@pytest.fixture(scope="module", autouse=True)
def no_process_sets_for_others() -> Iterator[None]:
    """Removes what a file's tests have registered: sets of equal ranks are refused."""
    yield
    sets = sys.modules.get("gradred.process_sets")
    if sets is not None and sets.core.is_initialized() and sets.core.failure() is None:
        for process_set in list(sets._registered):
            sets.remove_process_set(process_set)
