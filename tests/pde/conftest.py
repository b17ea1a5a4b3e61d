"""An engine for each module of tests, and contexts with grids of ranks."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Grids of ranks by the number of ranks.
DIMS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (2, 2)], 5: [(5, 1)]}


@pytest.fixture(autouse=True, scope="module")
def engine():
    import gradred

    gradred.init()


@pytest.fixture(scope="module")
def contexts():
    """A context for each grid of all ranks, and one of this rank alone."""
    import gradred
    from gradred.diff import Context

    size = gradred.size()
    grids = [Context(dims=dims) for dims in DIMS[size]]
    alone = Context([[rank] for rank in range(size)], dims=(1, 1))
    yield grids, alone
    for context in [*grids, alone]:
        context.close()
