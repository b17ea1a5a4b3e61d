"""Lines of several ranks on one output."""

from __future__ import annotations

import os
import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradred.launch.output import Output, Sink, _Stream


class Terminal:
    """A sink on a pipe, and what has been written to it."""

    def __init__(self, tag: bool = True) -> None:
        self.read_end, write = os.pipe()
        self.sink = Sink(write, tag)
        self.streams = [_Stream(rank, self.sink) for rank in range(3)]

    def write(self, rank: int, data: bytes) -> None:
        self.sink.write(self.streams[rank], data)

    def text(self) -> bytes:
        os.close(self.sink.descriptor)
        with os.fdopen(self.read_end, "rb") as file:
            return file.read()


def test_each_line_has_its_rank() -> None:
    terminal = Terminal()
    terminal.write(0, b"a\n\nb\r\n")
    terminal.write(2, b"c\n")
    assert terminal.text() == b"[0] a\n[0] \n[0] b\r\n[2] c\n"


def test_no_tag() -> None:
    terminal = Terminal(tag=False)
    terminal.write(0, b"a\nb\n")
    terminal.write(1, b"\xff\xfe\n")
    assert terminal.text() == b"a\nb\n\xff\xfe\n"


def test_a_pipe_that_somebody_has_made_non_blocking() -> None:
    terminal = Terminal()
    os.set_blocking(terminal.sink.descriptor, False)
    line = b"x" * 200_000 + b"\n"  # more than a pipe holds
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(terminal.write, 0, line)
        got = b""
        while len(got) < len(line) + 4:
            got += os.read(terminal.read_end, 1 << 20)
        writing.result(10)
    assert got == b"[0] " + line
    assert terminal.text() == b""


def test_progress_bar_overwrites_itself() -> None:
    terminal = Terminal()
    terminal.write(0, b"\r 1/9\r")
    terminal.write(0, b" 2/9\r 3/9\n")
    assert terminal.text() == b"\r[0]  1/9\r[0]  2/9\r[0]  3/9\n"


def test_another_rank_starts_a_new_line() -> None:
    terminal = Terminal()
    terminal.write(0, b"continue? ")
    terminal.write(0, b"yes\nnext ")
    terminal.write(1, b"line\n")
    terminal.write(0, b"go\n")
    assert terminal.text() == b"[0] continue? yes\n[0] next \n[1] line\n[0] go\n"


def test_lines_are_put_together(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A rank that writes a line in pieces, one that ends without a line end, and a long line."""
    selector = selectors.DefaultSelector()
    address = str(tmp_path / "s")
    output = Output(selector, address, tag=True, on_lost=lambda _: None)
    writers = []
    for rank in range(2):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address)
        out, err = os.pipe(), os.pipe()
        socket.send_fds(connection, [b"%d\n" % rank], [out[0], err[0]])
        for key, _ in selector.select(5):
            key.data(key.fd)
        assert connection.recv(1) == b"k"
        connection.close()
        os.close(out[0])
        os.close(err[0])
        writers.append((out[1], err[1]))

    def copy() -> None:
        while ready := selector.select(0):
            for key, _ in ready:
                key.data(key.fd)

    piece = b"x" * 50_000
    long_line = piece * 60  # longer than what is held back
    os.write(writers[0][0], b"first ")
    copy()
    for _ in range(60):
        os.write(writers[1][0], piece)
        copy()
        assert all(len(stream.pending) <= 1 << 20 for stream in output._streams.values())
    os.write(writers[1][0], b"\n")
    os.write(writers[1][1], b"error\n")
    copy()
    os.write(writers[0][0], b"half\nno end")
    copy()
    for pair in writers:
        for descriptor in pair:
            os.close(descriptor)
    end = time.monotonic() + 10
    while output.open and time.monotonic() < end:
        copy()
    output.close()
    text, errors = capfdbinary.readouterr()
    assert text == b"[1] " + long_line + b"\n[0] first half\n[0] no end\n"
    assert errors == b"[1] error\n"
