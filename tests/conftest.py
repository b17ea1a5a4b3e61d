"""Marks, fixtures and the job of the tests: see harness/ranks.py and harness/launches.py."""

from __future__ import annotations

import pytest

from harness.job import Job
from harness.launches import run_ranks
from harness.ranks import RanksPlugin, job, rank, shared_dir, size

__all__ = ["job", "rank", "run_ranks", "shared_dir", "size"]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RanksPlugin(Job()), "gradred-ranks")
