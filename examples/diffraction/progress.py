"""A progress bar on one line."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Counts up to ``total``; rewrites its line on a terminal, and prints every tenth elsewhere."""

    def __init__(
        self, label: str, total: int, *, show: bool = True, out: TextIO | None = None
    ) -> None:
        self.label, self.total, self.show = label, total, show
        self.out = out or sys.stderr
        self.done = 0
        self.started = time.perf_counter()
        self._tenth = -1

    def step(self, count: int = 1, note: str = "") -> None:
        self.done += count
        if not self.show:
            return
        seconds = time.perf_counter() - self.started
        left = seconds / self.done * (self.total - self.done)
        tenth = 10 * self.done // max(self.total, 1)
        filled = "#" * (2 * tenth) + "." * (20 - 2 * tenth)
        line = f"{self.label} [{filled}] {self.done}/{self.total}  {left:.0f} s left  {note}"
        if self.out.isatty():
            self.out.write("\r\x1b[K" + line)
        elif tenth != self._tenth:
            self.out.write(line.rstrip() + "\n")
        self._tenth = tenth
        self.out.flush()

    def close(self) -> None:
        if self.show and self.out.isatty():
            self.out.write("\n")
            self.out.flush()
