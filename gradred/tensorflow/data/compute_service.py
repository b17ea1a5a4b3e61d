"""Horovod's names for processes that prepare data for the ranks: all raise Unsupported."""

from __future__ import annotations

from typing import Any, NoReturn

from gradred.errors import Unsupported

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]


def _refuse(name: str) -> NoReturn:
    raise Unsupported(
        f"{name}: compute services are not supported: start TensorFlow's own with "
        "tf.data.experimental.service, and use it on each rank with dataset.apply"
    )


class TfDataServiceConfig:
    """Raises Unsupported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse("TfDataServiceConfig")


def tf_data_service(compute_config: Any, rank: int) -> NoReturn:
    """Raises Unsupported."""
    _refuse("tf_data_service")


def compute_worker_fn(compute_config: Any) -> NoReturn:
    """Raises Unsupported."""
    _refuse("compute_worker_fn")


def send_to_data_service(*_: Any, **__: Any) -> NoReturn:
    """Raises Unsupported."""
    _refuse("send_to_data_service")
