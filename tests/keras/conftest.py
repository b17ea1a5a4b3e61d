"""An engine for each module of tests; modules that test other things may shut it down."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")


@pytest.fixture(autouse=True, scope="module")
def engine():
    import gradred

    gradred.init()
