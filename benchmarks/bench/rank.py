"""A rank of a benchmark: does what the parent says until the parent goes away.

Started by bench.job. Requests are (module, function, arguments); modules are those in benchmarks/.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Client

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def rank_from_environment() -> int:
    for name in ("GRADRED_LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit("no launcher's variable says which rank this is")


def main() -> None:
    from bench import measure
    from bench.native import Region

    rank, size = rank_from_environment(), int(os.environ["BENCH_SIZE"])
    connection = Client(os.environ["BENCH_SOCKET"], "AF_UNIX")
    region = Region(os.environ["BENCH_SHARED"], rank, size)
    region.remove()
    measure.start(rank, size, region)
    connection.send((rank, os.getpid()))
    while True:
        try:
            module, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            result = getattr(importlib.import_module(module), function)(**arguments)
            reply = (True, result)
        except Exception:
            reply = (False, traceback.format_exc())
        connection.send(reply)


if __name__ == "__main__":
    main()
