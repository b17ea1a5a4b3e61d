"""Horovod's exceptions. See gradred.errors for those that gradred raises."""

from __future__ import annotations

from gradred.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Hosts came or went, in elastic training. Never raised: the ranks of a job are fixed."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework is not the one that was built for. Never raised: one build serves all versions.

    A TensorFlow that gradred cannot work with is Unsupported.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"built for {name} {installed_version}, found version {version}", name=name
        )
        self.version = version
        self.installed_version = installed_version
