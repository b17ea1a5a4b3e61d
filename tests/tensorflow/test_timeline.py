"""A training with a timeline: its steps, waits and groups are all there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import gradred.tensorflow as hvd
import tensorflow as tf
from gradred.launch import trace
from gradred.launch.trace_file import intervals, read

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.smoke]

STEPS = 6


def test_training(rank, size, tmp_path_factory):
    # The first rank's folder serves all, as in a job of one machine.
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("timeline")), name="folder")
    variables = [tf.Variable(tf.ones([n]), name=f"v{n}") for n in (3, 5, 7)]
    optimizer = tf.keras.optimizers.SGD(0.1)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * v * x) for v in variables])
        tape = hvd.DistributedGradientTape(tape, groups=2)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step(tf.constant(1.0))
    hvd.start_timeline(f"{folder}/t.json")
    for _ in range(STEPS):
        step(tf.constant(1.0 + rank))
    hvd.stop_timeline()
    path = f"{folder}/t.rank{rank}.json"
    assert trace.check([path]) == 0
    found = read(path)
    assert found.complete and found.info["size"] == size
    phases = Counter((i.phase, i.group) for i in intervals(found.events))
    assert phases["step", None] == phases["wait", None] == STEPS
    for group in range(2):
        assert phases["reduce", group] == phases["negotiation", group] == STEPS
    submitted = [e for e in found.events if e["name"] == "submit"]
    labels = Counter(e["args"]["entry"] for e in submitted)
    assert len(labels) == 3 and set(labels.values()) == {STEPS}
    batches = [i.batch for i in intervals(found.events) if i.phase == "step"]
    assert batches == list(range(1, STEPS + 1))
    steps = {i.batch: i for i in intervals(found.events) if i.phase == "step"}
    for i in intervals(found.events):  # all within their step
        assert steps[i.batch].begin <= i.begin <= i.end <= steps[i.batch].end
    assert np.isfinite(variables[0].numpy()).all()
