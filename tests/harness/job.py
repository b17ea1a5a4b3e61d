"""The job that runs the tests: rank, size, and a way to meet that does not use what is tested.

The ranks share one machine and the private folder that ``gradred run`` makes for a job; rank 0
listens there on a socket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

# (rank, size) as each launcher gives them to the programs it starts.
_RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("GRADRED_LOCAL_RANK", "GRADRED_LOCAL_SIZE"),
)


class JobError(Exception):
    """A rank ended, came late or ran other tests."""


def rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    for rank, size in _RANK_VARIABLES:
        if rank in environ and size in environ:
            return int(environ[rank]), int(environ[size])
    return 0, 1


class Job:
    """The ranks of this job. A job of one rank meets nobody."""

    def __init__(self) -> None:
        self.rank, self.size = rank_and_size()
        self._peers: dict[int, Connection] = {}  # on rank 0: all others; else rank 0 alone
        self._round = 0

    def open(self, deadline_s: float = 60.0) -> None:
        """Collective: connects all ranks with rank 0."""
        if self.size == 1:
            return
        folder = os.environ.get("GRADRED_JOB_DIR")
        if folder is None:
            raise JobError("start tests of several ranks with `gradred run -np N python -m pytest`")
        address = os.path.join(folder, "tests.sock")
        end = time.monotonic() + deadline_s
        if self.rank == 0:
            with Listener(address, "AF_UNIX", backlog=self.size) as listener:
                # Listener.accept has no deadline of its own.
                listener._listener._socket.settimeout(deadline_s)  # type: ignore[attr-defined]
                while len(self._peers) < self.size - 1:
                    try:
                        peer = listener.accept()
                    except OSError as error:
                        missing = set(range(1, self.size)) - set(self._peers)
                        raise JobError(f"ranks {sorted(missing)} did not start pytest") from error
                    self._peers[peer.recv()] = peer
            return
        while True:
            try:
                self._peers[0] = Client(address, "AF_UNIX")
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > end:
                    raise JobError("rank 0 did not start pytest") from None
                time.sleep(0.02)
        self._peers[0].send(self.rank)

    def exchange(self, mine: Any, what: str = "a barrier", deadline_s: float = 60.0) -> list[Any]:
        """Collective: all ranks' objects in rank order. JobError when a rank ended or came late."""
        if self.size == 1:
            return [mine]
        self._round += 1
        end = time.monotonic() + deadline_s
        try:
            if self.rank != 0:
                self._peers[0].send((self._round, mine))
                return self._receive(0, end, what)
            values = {0: mine}
            while len(values) < self.size:
                waiting = {self._peers[r]: r for r in self._peers if r not in values}
                if not wait(list(waiting), max(0.0, end - time.monotonic())):
                    raise JobError(f"ranks {sorted(waiting.values())} did not come to {what}")
                for connection, rank in waiting.items():
                    if connection.poll():
                        values[rank] = self._receive(rank, end, what)
            everything = [values[r] for r in range(self.size)]
            for peer in self._peers.values():
                peer.send((self._round, everything))
            return everything
        except BrokenPipeError as error:
            raise JobError(f"a rank ended before {what}") from error

    def barrier(self, what: str = "a barrier", deadline_s: float = 60.0) -> None:
        """Collective: returns when all ranks have called it."""
        self.exchange(None, what, deadline_s)

    def _receive(self, rank: int, end: float, what: str) -> Any:
        connection = self._peers[rank]
        if not connection.poll(max(0.0, end - time.monotonic())):
            raise JobError(f"rank {rank} did not come to {what}")
        try:
            number, value = connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise JobError(f"rank {rank} ended before {what}") from error
        if number != self._round:
            raise JobError(f"rank {rank} is at meeting {number}, rank {self.rank} at {self._round}")
        return value
