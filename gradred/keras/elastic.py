"""Horovod's names of elastic training for Keras: all raise Unsupported."""

from __future__ import annotations

from gradred.elastic import ObjectState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ObjectState):
    """Raises Unsupported."""


class TensorFlowKerasState(ObjectState):
    """Raises Unsupported."""


class CommitStateCallback(ObjectState):
    """Raises Unsupported."""


class UpdateBatchStateCallback(ObjectState):
    """Raises Unsupported."""


class UpdateEpochStateCallback(ObjectState):
    """Raises Unsupported."""
