"""S15: files of a model with a distributed optimizer, with gradred and where there is none."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import gradred
import gradred.keras as hvd
from harness.training import (
    KERAS_3,
    ROWS,
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    data,
    keras,
    my_rows,
    net,
    steps_of,
)

pytestmark = [pytest.mark.ranks(2, deadline=120), pytest.mark.smoke]

O = keras.optimizers  # noqa: E741

LOAD = """
import sys
sys.modules["gradred"] = None  # importing it is an error
import tensorflow as tf
import numpy as np

keras = tf.keras
model = keras.models.load_model(sys.argv[1])
assert type(model.optimizer) is keras.optimizers.Adam
before = int(tf.convert_to_tensor(model.optimizer.iterations))
model.fit(np.ones((4, 5)), np.ones((4, 2)), verbose=0)
assert int(tf.convert_to_tensor(model.optimizer.iterations)) == before + 1 == 6
"""


def train(model, rank, size):
    x, y = data()
    rows = my_rows(rank, size)
    model.fit(x[rows], y[rows], batch_size=ROWS // size, shuffle=False, verbose=0)


def test_a_file_loads_where_there_is_no_gradred(rank, size, shared_dir):
    model = net("float32")
    model.compile(optimizer=hvd.DistributedOptimizer(O.Adam(0.01)), loss="mse")
    train(model, rank, size)
    assert steps_of(model.optimizer) == STEPS
    if rank == 0:
        path = str(shared_dir / "model.keras")
        model.save(path)
        done = subprocess.run(
            [sys.executable, "-c", LOAD, path], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr


class Half(O.SGD):
    """An optimizer of the user's."""

    def update_step(self, gradient, variable, *rest):
        super().update_step(gradient * 0.5, variable, *rest)


OPTIMIZERS = {
    "Adam": lambda: O.Adam(0.01),
    "momentum": lambda: O.SGD(0.05, momentum=0.9),
    "custom": lambda: Half(0.05, momentum=0.9),
    "scaled": lambda: keras.mixed_precision.LossScaleOptimizer(O.Adam(0.01), initial_scale=64.0),
}


CASES = [(name, ".keras") for name in OPTIMIZERS]
if not KERAS_3:  # which cannot go on with an optimizer from such a file
    CASES.append(("momentum", ".h5"))


@pytest.mark.parametrize(("name", "ending"), CASES)
def test_a_loaded_model_goes_on(name, ending, rank, size, shared_dir):
    """As the model that was not saved, also with a file that a single process wrote."""
    if not KERAS_3 and name == "scaled":
        pytest.skip("Keras 2 does not load the state of a loss scale from these files")
    model = net("float32")
    optimizer = OPTIMIZERS[name]()
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
    train(model, rank, size)
    path = str(shared_dir / f"model{ending}")
    if rank == 0:
        model.save(path)
    hvd.barrier()
    loaded = hvd.load_model(path, custom_optimizers=[Half])
    assert steps_of(loaded.optimizer) == STEPS
    assert type(loaded.optimizer).__name__ == type(optimizer).__name__
    with pytest.raises(gradred.InvalidArgument, match="is distributed already"):
        hvd.DistributedOptimizer(loaded.optimizer)
    for one in (model, loaded):
        train(one, rank, size)
    assert_close(loaded.get_weights(), model.get_weights(), 0)
    assert_same_on_all_ranks(loaded.get_weights())


def test_options_of_loading(rank, size, shared_dir):
    """Compression is used; without an optimizer there is nothing to wrap; XLA is switched off."""
    paths = [str(shared_dir / name) for name in ("compiled.keras", "plain.keras")]
    if rank == 0:
        model = net("float32")
        model.save(paths[1])
        model.compile(optimizer=O.SGD(2.0**-20), loss="mse", jit_compile=True)
        model.optimizer.build(model.trainable_variables)
        model.save(paths[0])
    hvd.barrier()
    assert getattr(hvd.load_model(paths[1]), "optimizer", None) is None
    model = hvd.load_model(paths[0], compression=hvd.Compression.fp16)
    assert not model.jit_compile
    before = gradred.metrics().saturated
    model.fit(np.full((2, 5), 1e6), np.full((2, 2), 1e7), verbose=0)  # beyond float16
    assert gradred.metrics().saturated > before
