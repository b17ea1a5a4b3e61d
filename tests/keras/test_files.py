"""S15: files of a model with a distributed optimizer, where there is no gradred."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import gradred.keras as hvd
from harness.training import KERAS_3, ROWS, STEPS, data, keras, my_rows, net

pytestmark = pytest.mark.ranks(2, deadline=120)

LOAD = """
import sys
sys.modules["gradred"] = None  # importing it is an error
import keras
import numpy as np

model = keras.models.load_model(sys.argv[1])
assert type(model.optimizer) is keras.optimizers.Adam
before = int(model.optimizer.iterations)
model.fit(np.ones((4, 5)), np.ones((4, 2)), verbose=0)
assert int(model.optimizer.iterations) == before + 1 == 6
"""


@pytest.mark.skipif(not KERAS_3, reason="the .keras format")
def test_a_file_loads_where_there_is_no_gradred(rank, size, shared_dir):
    x, y = data()
    rows = my_rows(rank, size)
    model = net("float32")
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    model.fit(x[rows], y[rows], batch_size=ROWS // size, verbose=0)
    assert int(np.asarray(model.optimizer.iterations)) == STEPS
    if rank == 0:
        path = str(shared_dir / "model.keras")
        model.save(path)
        done = subprocess.run(
            [sys.executable, "-c", LOAD, path], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
