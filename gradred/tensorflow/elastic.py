"""Horovod's names of elastic training for TensorFlow: all raise Unsupported."""

from __future__ import annotations

from gradred.elastic import ObjectState, State, run
from gradred.errors import HorovodInternalError

__all__ = [
    "HorovodInternalError",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


class TensorFlowState(ObjectState):
    """Raises Unsupported."""


class TensorFlowKerasState(ObjectState):
    """Raises Unsupported."""
