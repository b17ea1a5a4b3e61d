"""Twenty float16 steps with an overflow on one rank: every rank skips the same steps.

gradred run -np 2 python overflow.py
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import model as densenet
import numpy as np

import gradred
import gradred.keras as hvd
import keras

STEPS, BAD_STEP = 20, 7


def main() -> None:
    hvd.init()
    keras.utils.set_random_seed(0)
    net = densenet.build(densenet.PRESETS["tiny"], "mixed_float16")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    # compile() puts a LossScaleOptimizer around it; skipping is still agreed by all ranks.
    net.compile(optimizer=optimizer, loss="mse")
    rng = np.random.default_rng(hvd.rank())
    skipped = []
    for step in range(STEPS):
        x = rng.normal(size=(2, 64, 64, 64)).astype(np.float32)
        y = rng.normal(size=(2, 64, 64)).astype(np.float32)
        if step == BAD_STEP and hvd.rank() == hvd.size() - 1:
            x[0, 0, 0, 0] = np.inf
        before = int(optimizer.iterations)
        net.train_on_batch(x, y)
        if int(optimizer.iterations) == before:
            skipped.append(step)
    everyone = gradred.allgather_object(skipped)
    if any(other != everyone[0] for other in everyone):
        raise SystemExit(f"overflow.py: ranks skipped different steps: {everyone}")
    if BAD_STEP not in skipped:
        raise SystemExit(f"overflow.py: step {BAD_STEP} overflowed on one rank and was not skipped")
    if hvd.rank() == 0:
        scale = float(np.asarray(net.optimizer.dynamic_scale))
        print(
            f"float16: all {hvd.size()} ranks skipped steps {skipped} of {STEPS}; "
            f"loss scale {scale:.0f}; "
            f"{gradred.metrics().non_finite} non-finite gradient elements seen"
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
