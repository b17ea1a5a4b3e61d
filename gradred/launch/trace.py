"""``gradred trace``: put the ranks' timelines together, sum them up, check them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gradred.launch.errors import UsageError
from gradred.launch.trace_file import Event, Trace, read, read_all
from gradred.launch.trace_summary import summary


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``gradred trace``."""
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=type(parser)
    )
    merge = actions.add_parser("merge", help="one file for all ranks", allow_abbrev=False)
    merge.add_argument("files", nargs="+", metavar="FILE", help="PATH.rankN.json")
    merge.add_argument("-o", "--output", required=True, metavar="FILE", help="where to write")
    for name, text in (
        ("summary", "steps, waits, hidden communication, late ranks, for each domain"),
        ("check", "whether files load, and what they hold; exit code 1 when not"),
    ):
        action = actions.add_parser(name, help=text, allow_abbrev=False)
        action.add_argument("files", nargs="+", metavar="FILE", help="PATH.rankN.json")


def main(arguments: argparse.Namespace) -> int:
    """Runs the action; returns the exit code."""
    if arguments.action == "merge":
        return merge(arguments.files, arguments.output)
    if arguments.action == "summary":
        print(summary(read_all(arguments.files)), end="")
        return 0
    return check(arguments.files)


def merge(paths: Sequence[str], output: str) -> int:
    """Writes one array of all ranks' events, in the order of time."""
    traces = read_all(paths)
    if Path(output).exists() and any(Path(output).samefile(path) for path in paths):
        raise UsageError(f"-o {output}: is one of the files to merge")
    events = sorted((e for trace in traces for e in trace.events), key=lambda e: e["ts"])
    everything = [e for trace in traces for e in trace.metadata] + events
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write("[\n")
            file.write(",\n".join(json.dumps(e, separators=(",", ":")) for e in everything))
            file.write("\n]")
    except OSError as error:
        raise UsageError(f"-o {output}: {error.strerror}") from error
    ranks = f"{len(traces)} of {traces[0].info['size']} ranks"
    print(f"{output}: {len(events)} events of {ranks}")
    return 0


def check(paths: Sequence[str]) -> int:
    """A line a file, and one for each thing that is wrong."""
    code = 0
    for path in paths:
        try:
            trace = read(path)
        except UsageError as error:
            print(f"{error}")
            code = 1
            continue
        wrong = problems(trace)
        how = "complete" if trace.complete else "ended without a stop"
        print(f"{path}: rank {trace.rank}, {len(trace.events)} events, {how}{_details(trace)}")
        for line in wrong:
            print(f"{path}: {line}")
        code = code or int(bool(wrong))
    return code


def _details(trace: Trace) -> str:
    kinds = Counter(_kind(event) for event in trace.events if event["ph"] != "e")
    parts = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    if trace.cut_nbytes:
        parts.append(f"{trace.cut_nbytes} bytes of a line cut off")
    return ": " + ", ".join(parts) if parts else ""


def _kind(event: Event) -> str:
    name = str(event["name"])
    return name.rpartition(": ")[2] if event["ph"] == "b" else name


def problems(trace: Trace) -> list[str]:
    """What cannot be in a good file: spans that cross, phases that do not fit together."""
    found = []
    open_spans: dict[int, list[tuple[float, str]]] = {}
    spans = sorted((e for e in trace.events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    for event in spans:
        stack = open_spans.setdefault(event["tid"], [])
        end = event["ts"] + event["dur"]
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        # Begin and length are rounded to a nanosecond each.
        if stack and end > stack[-1][0] + 0.0025:
            found.append(
                f"thread {event['tid']}: '{event['name']}' at {event['ts']:.3f} us ends after "
                f"'{stack[-1][1]}', in which it begins"
            )
        else:
            stack.append((end, event["name"]))
    phases: dict[tuple[str, str], str] = {}
    for event in trace.events:
        if event["ph"] not in "be":
            continue
        key = (event["name"], event["id2"]["local"])
        is_open = phases.get(key) == "b"
        if is_open == (event["ph"] == "b"):
            of = f" of batch {event['args']['batch']}" if "batch" in event.get("args", {}) else ""
            batch = f"'{event['name']}'{of}"
            found.append(f"{batch} {'begins twice' if is_open else 'ends but did not begin'}")
        phases[key] = event["ph"]
    if trace.lost or not trace.complete:
        # The missing ones may be anywhere, or behind the end.
        found = [line for line in found if "did not begin" not in line and "twice" not in line]
    elif unfinished := sum(ph == "b" for ph in phases.values()):
        found.append(f"{unfinished} phases do not end, although the recording was stopped")
    return found
