"""``gradred trace`` on files whose content is known."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gradred.launch import cli
from gradred.launch.trace_file import intervals, read

Event = dict[str, Any]


def phase(name: str, begin: float, end: float | None, batch: int = 1, group: int | None = None):
    """The two events of a phase; end None: it does not end."""
    args: Event = {"batch": batch}
    number = batch << 16
    if group is not None:
        args["group"] = group
        number += group + 1
    event = {"name": f"net: {name}", "cat": "x", "id2": {"local": f"0x{number:x}"}, "tid": 1}
    yield {"ph": "b", "ts": begin, "args": {**args, "bytes": 1000}, **event}
    if end is not None:
        yield {"ph": "e", "ts": end, "args": args, **event}


def span(name: str, begin: float, duration: float, tid: int = 2) -> Event:
    return {"ph": "X", "ts": begin, "dur": duration, "name": name, "tid": tid}


def step(late: float = 0.0, batch: int = 1) -> list[Event]:
    """Two groups: the first reduced before the last submit, the other after it."""
    t = 1000.0 * batch
    return [
        *phase("step", t, t + 500, batch),
        *phase("waiting for members", t, t + 10 + late, batch, 0),
        *phase("negotiation", t + 10 + late, t + 100, batch, 0),
        *phase("reduce", t + 100, t + 200, batch, 0),
        *phase("negotiation", t + 250 + late, t + 300, batch, 1),
        *phase("wait", t + 250, t + 500, batch),
        *phase("reduce", t + 300, t + 400, batch, 1),
    ]


def write(folder: Path, rank: int, events: list[Event], **info: Any) -> Path:
    """A file as a stopped recording leaves it."""
    values = {
        "format": 1,
        "rank": rank,
        "size": 2,
        "host": "here",
        "origin_ns": 5,
        "clock_uncertainty_ns": 0,
        **info,
    }
    head = {"ph": "M", "name": "gradred_timeline", "args": values}
    lines = [json.dumps(e | {"pid": rank + 1}) for e in (head, *events)]
    path = folder / f"t.rank{rank}.json"
    path.write_text("[\n" + ",\n".join(lines) + "\n]")
    return path


def run(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> str:
    assert cli.main(["trace", *map(str, words)]) == code
    out, err = capsys.readouterr()
    return out if code != 2 else err


def test_merge(tmp_path: Path, capsys) -> None:
    files = [write(tmp_path, r, step(late=3.0 * r)) for r in (1, 0)]
    target = tmp_path / "all.json"
    out = run(capsys, "merge", *files, "-o", target)
    assert "28 events of 2 of 2 ranks" in out
    events = json.loads(target.read_text())
    assert {e["pid"] for e in events} == {1, 2}
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)
    assert "is one of the files" in run(capsys, "merge", *files, "-o", files[0], code=2)
    nowhere = tmp_path / "no" / "x.json"
    message = run(capsys, "merge", *files, "-o", nowhere, code=2)
    assert str(nowhere) in message and "No such file" in message


def test_summary(tmp_path: Path, capsys) -> None:
    events = [span("round", 0.0, 2.0, 1000), span("empty round", 5.0, 2.0, 1000)]
    files = [write(tmp_path, r, events + step(5.0 * r, 1) + step(5.0 * r, 2)) for r in range(2)]
    out = run(capsys, "summary", *files)
    assert "2 of 2 ranks, 0.002 s; rounds a rank: 2, 1 of them empty" in out
    assert "steps: 2 a rank, median 500.0 us" in out
    assert "a new one every 1.00 ms" in out
    assert "wait after the last submit: median 250.0 us, max 250.0 us" in out
    assert "communication: mean 200.0 us a step, 50 % of it before the last submit" in out
    assert "bytes: 2000 a step in 2 groups" in out
    assert "slowest: rank 1 is last in 100 % of groups, by 5.0 us" in out
    assert "group 1: 1000 bytes, median 100.0 us, 0.01 GB/s" in out


def test_summary_of_a_plan_that_changes(tmp_path: Path, capsys) -> None:
    """Groups of other plans are no groups of each step."""
    one = [
        *phase("step", 100.0, 900.0, 1),
        *phase("reduce", 100.0, 800.0, 1, 0),
        *phase("reduce", 200.0, 800.0, 1, 1),
        *phase("wait", 300.0, 900.0, 1),
        *phase("reduce", 700.0, 800.0, 1, 2),
    ]
    file = write(tmp_path, 0, [*one, *step(0.0, 2), *step(0.0, 3)])
    out = run(capsys, "summary", file)
    assert "bytes: 2000 a step in 2 groups, in 67 % of the steps" in out
    assert "group 0: 1000 bytes, median 100.0 us" in out
    assert "group 2" not in out


def test_summary_of_notes_and_unfinished_steps(tmp_path: Path, capsys) -> None:
    note = {"ph": "i", "ts": 2e6, "tid": 0, "name": "abort", "args": {"text": "rank 1 is gone"}}
    file = write(tmp_path, 0, [*phase("step", 0.0, None), *phase("wait", 1.0, 2.0), note])
    out = run(capsys, "summary", file)
    assert "1 of 2 ranks" in out
    assert "no step was recorded" in out
    assert "rank 0 at 2.000 s: abort: rank 1 is gone" in out


def test_check(tmp_path: Path, capsys) -> None:
    good = [span("pack", 0.0, 10.0), span("part", 2.0, 8.0), span("pack", 10.0, 1.0)]
    out = run(capsys, "check", write(tmp_path, 0, good + step()))
    assert "rank 0, 17 events, complete" in out
    assert "2 negotiation" in out and "2 pack" in out


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([span("pack", 0.0, 10.0), span("late", 5.0, 6.0)], "'late' at 5.000 us ends after 'pack'"),
        (list(phase("step", 0.0, None)), "1 phases do not end"),
        ([*phase("step", 0.0, None), *phase("step", 1.0, 2.0)], "begins twice"),
        (list(phase("step", 0.0, 1.0))[1:], "ends but did not begin"),
    ],
)
def test_check_finds(tmp_path: Path, capsys, events: list[Event], message: str) -> None:
    assert message in run(capsys, "check", write(tmp_path, 0, events), code=1)


def test_a_file_cut_anywhere(tmp_path: Path, capsys) -> None:
    whole = write(tmp_path, 0, [span("pack", i, 1.0) for i in range(30)])
    data = whole.read_bytes()
    first = data.index(b"\n", data.index(b"gradred_timeline")) + 1
    seed = random.randrange(1 << 30)
    print("seed", seed)
    cuts = random.Random(seed).sample(range(first, len(data)), 100)
    for cut in (*cuts, first, len(data) - 1):
        whole.write_bytes(data[:cut])
        trace = read(str(whole))
        assert not trace.complete
        lines = data[:cut].count(b"\n") - 2  # without the bracket and the first line
        assert lines <= len(trace.events) <= lines + 1  # the last one may lack its newline alone
        assert "ended without a stop" in run(capsys, "check", whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a timeline of gradred"),
        ("[\n{},\n]", "line 2 is no event"),
        ("[\nnonsense,\n{}\n]", "line 2 is no event"),
        ('[\n{"ph":"M","name":"gradred_timeline","args":{"format":9}}\n]', "format 9"),
    ],
)
def test_other_files(tmp_path: Path, capsys, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert message in run(capsys, "check", path, code=1)
    assert message in run(capsys, "summary", path, code=2)


def test_files_that_do_not_belong_together(tmp_path: Path, capsys) -> None:
    (tmp_path / "other").mkdir()
    mine = write(tmp_path, 0, step())
    same = write(tmp_path / "other", 0, step())
    assert "are both of rank 0" in run(capsys, "summary", mine, same, code=2)
    other = write(tmp_path, 1, step(), origin_ns=6)
    assert "different recordings: origin_ns is 5 and 6" in run(
        capsys, "summary", mine, other, code=2
    )
    message = run(capsys, "summary", tmp_path / "none.json", code=2)
    assert "none.json: No such file" in message


def test_intervals() -> None:
    events = sorted(step(), key=lambda e: e["ts"])
    found = {(i.phase, i.group): (i.begin, i.end, i.nbytes) for i in intervals(events)}
    assert found["reduce", 1] == (1300.0, 1400.0, 1000)
    assert found["step", None] == (1000.0, 1500.0, 1000)
    assert len(found) == 7
