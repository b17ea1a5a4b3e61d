"""The rendezvous that Horovod's ranks need when they do without MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rendezvous"]


@contextmanager
def rendezvous(size: int) -> Iterator[dict[str, str]]:
    """A server in this process for one job of ``size`` ranks; the variables that name it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Horovod starts processes to try TensorFlow
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(verbose=0)
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
    try:
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }
    finally:
        server.stop()
