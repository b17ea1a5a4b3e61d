"""Several updates by one optimizer in one function."""

from __future__ import annotations

import numpy as np
import pytest

import gradred.tensorflow as hvd
import tensorflow as tf

pytestmark = pytest.mark.ranks(2)


def test_updates_in_one_function(rank, size):
    v = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), op=hvd.Sum)
    optimizer.build([v])

    @tf.function(autograph=False)
    def steps():
        for i in range(3):
            optimizer.apply_gradients([(tf.constant([rank + 1.0, 10.0**i]), v)])

    steps()
    steps()
    np.testing.assert_array_equal(v, [-6.0 * size * (size + 1) / 2, -222.0 * size])
