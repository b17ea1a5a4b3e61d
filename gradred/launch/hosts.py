"""Host lists: "node1:4,node2:4", or a file with lines "node1 slots=4" or "node1:4"."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from gradred.launch.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Host:
    name: str
    slots: int  # ranks it takes

    @property
    def is_this_machine(self) -> bool:
        return self.name in ("localhost", "127.0.0.1", socket.gethostname())


def parse_host(text: str) -> Host:
    name, _, slots = text.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(f"host {text!r}: expected name or name:slots")
    if slots and not (slots.isdecimal() and int(slots) > 0):
        raise UsageError(f"host {text!r}: the number of slots is a whole number above 0")
    return Host(name, int(slots or 1))


def parse_hosts(text: str) -> list[Host]:
    hosts = [parse_host(part.strip()) for part in text.split(",")]
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"host {name} is named twice")
    return hosts


def read_hostfile(path: str) -> list[Host]:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: {error}") from None
    words = [re.sub(r"\s+slots\s*=\s*", ":", line.partition("#")[0].strip()) for line in lines]
    words = [word for word in words if word]
    if not words:
        raise UsageError(f"--hostfile {path} names no host")
    return parse_hosts(",".join(words))
