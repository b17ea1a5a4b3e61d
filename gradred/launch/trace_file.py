"""Reading timelines: one file of events a rank, which may have been cut anywhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradred.launch.errors import UsageError

Event = dict[str, Any]

PHASES = ("step", "wait", "waiting for members", "negotiation", "queued", "reduce")


@dataclass
class Trace:
    """A rank's file. Times are in us of rank 0's clock since the start."""

    path: str
    info: dict[str, Any]
    events: list[Event] = field(default_factory=list)  # without metadata, in the order of time
    metadata: list[Event] = field(default_factory=list)
    complete: bool = False  # closed by stop_timeline or at exit
    cut_nbytes: int = 0  # behind the last whole line

    @property
    def rank(self) -> int:
        return int(self.info["rank"])

    @property
    def lost(self) -> int:
        """Events that did not fit in a ring."""
        return sum(e["args"]["events"] for e in self.events if e["name"] == "lost events")


def read(path: str) -> Trace:
    """One rank's file. Raises UsageError with path and reason for what is none."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    metadata: list[Event] = []
    events: list[Event] = []
    complete, cut = data.endswith(b"\n]"), 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        text = line.strip().removesuffix(b",")
        if text in (b"", b"[", b"]"):
            continue
        try:
            event = json.loads(text.decode(errors="replace"))
        except ValueError as error:
            if number == len(lines):
                cut = len(line)
                continue
            raise UsageError(f"{path}: line {number} is no event: {error}") from error
        if not isinstance(event, dict) or "ph" not in event or "name" not in event:
            raise UsageError(f"{path}: line {number} is no event")
        (metadata if event["ph"] == "M" else events).append(event)
    info = [e["args"] for e in metadata if e["name"] == "gradred_timeline"]
    if not info:
        raise UsageError(f"{path}: not a timeline of gradred (no line says which rank wrote it)")
    if info[0].get("format") != 1:
        raise UsageError(f"{path}: format {info[0].get('format')!r}; this gradred reads format 1")
    events.sort(key=lambda e: e["ts"])  # stable: what one thread wrote at one time stays in order
    return Trace(path, info[0], events, metadata, complete, cut)


def read_all(paths: Sequence[str]) -> list[Trace]:
    """Files of one recording, in the order of ranks. Raises UsageError for others."""
    traces = sorted((read(path) for path in paths), key=lambda t: t.rank)
    first = traces[0]
    for before, trace in itertools.pairwise(traces):
        if before.rank == trace.rank:
            raise UsageError(f"{before.path} and {trace.path} are both of rank {trace.rank}")
    for trace in traces:
        for key in ("size", "origin_ns"):
            if trace.info[key] != first.info[key]:
                raise UsageError(
                    f"{first.path} and {trace.path} are of different recordings: {key} is "
                    f"{first.info[key]} and {trace.info[key]}"
                )
    return traces


def phase_of(event: Event) -> tuple[str, str]:
    """Domain and phase of a "b" or "e" event, whose name is "domain: phase"."""
    domain, _, phase = event["name"].rpartition(": ")
    return domain, phase


@dataclass(frozen=True)
class Interval:
    """A phase of a batch (group None) or of one of its groups; us."""

    domain: str
    phase: str
    batch: int
    group: int | None
    begin: float
    end: float
    nbytes: int
    pack: float = 0.0  # of a reduce: us that the data thread spent on it
    sum: float = 0.0
    unpack: float = 0.0


def intervals(events: Sequence[Event]) -> Iterator[Interval]:
    """The phases of batches and groups that began and ended, in the order of their ends."""
    opened: dict[tuple[str, str], Event] = {}
    for event in events:
        key = (event["name"], event.get("id2", {}).get("local", ""))
        if event.get("cat") == "stage":
            continue
        if event["ph"] == "b":
            opened[key] = event
        elif event["ph"] == "e" and key in opened:
            begin = opened.pop(key)
            args, spent = begin["args"], event["args"]
            domain, phase = phase_of(begin)
            yield Interval(
                domain,
                phase,
                args["batch"],
                args.get("group"),
                begin["ts"],
                event["ts"],
                args.get("bytes", 0),
                *(spent.get(f"{work}_us", 0.0) for work in ("pack", "sum", "unpack")),
            )
