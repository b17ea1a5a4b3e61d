"""Whole trainings with fit as jobs of their own: ranks that fail, and that are late."""

from __future__ import annotations

import json

FIT = """
import json, os, signal, sys, time
import numpy as np
import gradred.keras as hvd
import tensorflow as tf
from gradred.tensorflow.native import as_gradred_error

keras = tf.keras

class Act(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        global start
        start = time.monotonic()
        if hvd.rank() == 1 and batch == 3:
            ACT

hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
x = np.ones((STEPS, 4), np.float32)
try:
    model.fit(x, x[:, :3], batch_size=1, verbose=0, callbacks=[Act()])
except tf.errors.OpError as error:
    ours = as_gradred_error(error)
    kind = f"{type(error).__name__} {type(ours).__name__}"
    print(json.dumps([kind, str(ours), time.monotonic() - start]))
    sys.exit(9)
"""


def caught(text: str) -> tuple[str, str, float]:
    [line] = [line for line in text.splitlines() if line.startswith("[")]
    return tuple(json.loads(line))


def fit(act: str, steps: str = "8") -> str:
    return FIT.replace("ACT", act).replace("STEPS", steps)


def test_a_rank_that_raises_in_fit(run_ranks) -> None:
    """H13"""
    result = run_ranks(2, fit("raise ValueError('boom in step 3')"), timeout=120)
    assert result.codes == [9, 1], result.text
    kind, text, seconds = caught(result.out[0])
    assert kind == "AbortedError Abandoned", result.text
    assert "rank 1" in text and "ValueError: boom in step 3" in text, text
    assert seconds < 5, result.text


def test_a_rank_that_is_killed_in_fit(run_ranks) -> None:
    """H13"""
    result = run_ranks(2, fit("os.kill(os.getpid(), signal.SIGKILL)"), timeout=120)
    assert result.codes == [9, -9], result.text
    kind, text, seconds = caught(result.out[0])
    assert kind.endswith(" PeerLost"), result.text
    assert "rank 1" in text and "SIGKILL" in text, text
    assert seconds < 5, result.text


def test_one_step_more_than_others_make(run_ranks) -> None:
    """H12: the others are busy with something else."""
    program = fit("pass", "8 - hvd.rank()") + "time.sleep(10 * hvd.rank())\n"
    limits = {"GRADRED_STALL_FAIL_SECONDS": "3"}
    result = run_ranks(2, program, env=limits, timeout=120)
    assert result.codes[0] == 9, result.text
    assert result.returncode != 0, result.text
    kind, text, seconds = caught(result.out[0])
    assert kind == "DeadlineExceededError Timeout", result.text
    assert "not submitted by rank 1" in text, text
    assert "dense/kernel" in text and "dense/bias" in text, text
    assert 2.9 < seconds < 4.5, result.text
