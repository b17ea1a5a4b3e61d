"""An engine and a context of all ranks for each module of tests."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture(scope="module")
def context():
    import gradred
    from gradred.diff import Context

    gradred.init()
    context = Context(name="all")
    yield context
    context.close()
