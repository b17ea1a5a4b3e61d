"""Brings the ranks' output together: whole lines, the rank in front, output and error apart."""

from __future__ import annotations

import os
import re
import select
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

_CHUNK_NBYTES = 1 << 16
_IDLE_S = 0.3  # after that, a line without an end is shown: it may be a prompt or a progress bar
_LONGEST_NBYTES = 1 << 20  # of a line that is held back until it ends
_END = re.compile(rb"\r\n|\n|\r")


@dataclass
class _Stream:
    """What one rank writes to one of its two outputs."""

    rank: int
    sink: Sink
    pending: bytes = b""  # the start of a line
    since: float = 0.0


class Sink:
    """Where lines go: descriptor 1 or 2. Knows whose unfinished line was shown last."""

    def __init__(self, descriptor: int, tag: bool) -> None:
        self.descriptor, self.tag = descriptor, tag
        self.open_line: _Stream | None = None

    def write(self, stream: _Stream, data: bytes) -> None:
        """Writes pieces that end with a line end, except the last one, which may not."""
        pieces = []
        start = 0
        if self.open_line is not None and self.open_line is not stream:
            pieces.append(b"\n")
        continued = self.open_line is stream
        while start < len(data):
            match = _END.search(data, start)
            end = match.end() if match else len(data)
            bare_return = data[start:end] == b"\r"
            if self.tag and not continued and not bare_return:
                pieces.append(b"[%d] " % stream.rank)
            pieces.append(data[start:end])
            continued = False
            self.open_line = None if match else stream
            start = end
        view = memoryview(b"".join(pieces))
        while view:
            try:
                view = view[os.write(self.descriptor, view) :]
            except BlockingIOError:  # somebody who shares our terminal or pipe has set it so
                select.select([], [self.descriptor], [])


class Output:
    """Takes the pipes that supervisors send to a socket and copies what comes out of them.

    `on_lost` is called when our own output cannot be written: with "" when it is closed
    (``gradred run ... | head``), else with the reason, such as a full disk.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: str,
        tag: bool,
        on_lost: Callable[[str], None],
    ) -> None:
        self._selector, self._on_lost = selector, on_lost
        self._sinks = (Sink(1, tag), Sink(2, tag))
        self._streams: dict[int, _Stream] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(1024)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _: int) -> None:
        connection, _address = self._listener.accept()
        with connection:
            connection.settimeout(5.0)
            try:
                data, descriptors, _flags, _from = socket.recv_fds(connection, 64, 2)
                if not descriptors:
                    return  # a supervisor asks whether we live, or was ended in between
                connection.send(b"k")
            except OSError:
                return
        for descriptor, sink in zip(descriptors, self._sinks, strict=True):
            self._streams[descriptor] = _Stream(int(data), sink)
            self._selector.register(descriptor, selectors.EVENT_READ, self._read)

    def _read(self, descriptor: int) -> None:
        stream = self._streams[descriptor]
        data = os.read(descriptor, _CHUNK_NBYTES)
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            del self._streams[descriptor]
            if stream.pending or stream.sink.open_line is stream:
                self._write(stream, stream.pending + b"\n")
            return
        text = stream.pending + data
        # A carriage return at the very end may be half of a line end.
        cut = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)) + 1
        if len(text) - cut > _LONGEST_NBYTES:
            cut = len(text) - text.endswith(b"\r")
        stream.pending, stream.since = text[cut:], time.monotonic()
        if cut:
            self._write(stream, text[:cut])

    def _write(self, stream: _Stream, data: bytes) -> None:
        try:
            stream.sink.write(stream, data)
        except BrokenPipeError:
            self._on_lost("")
        except OSError as error:
            self._on_lost(error.strerror or str(error))

    def show_unfinished(self) -> None:
        """Shows lines that have been waiting for their end."""
        now = time.monotonic()
        for stream in self._streams.values():
            if stream.pending and now - stream.since > _IDLE_S:
                data, stream.pending = stream.pending, b""
                self._write(stream, data)

    @property
    def waiting(self) -> bool:
        """Whether show_unfinished will have something to do."""
        return any(stream.pending for stream in self._streams.values())

    @property
    def open(self) -> bool:
        return bool(self._streams)

    def close(self) -> None:
        for descriptor in list(self._streams):
            os.set_blocking(descriptor, False)
            try:
                self._read(descriptor)
            except BlockingIOError:
                pass
        for descriptor, stream in self._streams.items():
            if stream.pending:
                self._write(stream, stream.pending + b"\n")
            self._selector.unregister(descriptor)
            os.close(descriptor)
        self._streams.clear()
        self._selector.unregister(self._listener)
        self._listener.close()
