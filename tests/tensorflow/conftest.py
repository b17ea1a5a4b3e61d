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


def pytest_collection_modifyitems():
    """Two devices, for graphs with parts on both; before anything else starts TensorFlow."""
    import tensorflow as tf

    cpus = tf.config.list_physical_devices("CPU")
    if tf.config.get_logical_device_configuration(cpus[0]) is None:
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpus[0], two)
