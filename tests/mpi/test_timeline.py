"""Timelines of small jobs: complete, nested, readable after a kill, never in the way."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gradred.launch import trace
from gradred.launch.trace_file import intervals, read, read_all
from gradred.timeline import distance

STEPS = """
import sys
import numpy as np
import gradred as gr
gr.init()
for _ in range(5):
    gr.grouped_allreduce([np.ones(1000, np.float32), np.ones(10)], name="grads")
"""


def files_of(folder: Path, ranks: int) -> list[str]:
    return [str(folder / f"t.rank{rank}.json") for rank in range(ranks)]


def phases(path: str) -> Counter[tuple[str, str]]:
    return Counter((i.domain, i.phase) for i in intervals(read(path).events))


def check_five_steps(files: list[str]) -> None:
    assert trace.check(files) == 0
    for path in files:
        found = phases(path)
        assert {found["grads", p] for p in ("step", "wait", "reduce", "negotiation")} == {5}, path
        events = read(path).events
        names = Counter(e["name"] for e in events)
        assert (names["submit"], names["plan"]) == (10, 1)
        assert names["done"] <= 10
        assert all(e["dur"] >= 1 for e in events if e["name"] == "done")  # us
        assert names["unpack"] == 0  # only with chunks
        reduces = [i for i in intervals(read(path).events) if i.phase == "reduce"]
        assert all(i.unpack > 0 and i.sum > 0 for i in reduces)
        assert all(i.pack + i.sum + i.unpack <= i.end - i.begin for i in reduces)
        assert names["round"] > 0


@pytest.mark.parametrize("launcher", ["gradred", "local"])
def test_from_init_to_the_end(run_ranks, tmp_path, launcher: str) -> None:
    path = str(tmp_path / "t.json")
    result = run_ranks(2, STEPS, launcher=launcher, env={"GRADRED_TIMELINE": path})
    assert result.returncode == 0, result.text
    files = files_of(tmp_path, 2)
    check_five_steps(files)
    traces = read_all(files)
    assert all(t.complete and t.lost == 0 for t in traces)
    begins = [next(e for e in t.events if e["ph"] == "b")["ts"] for t in traces]
    assert all(0 < b < 60e6 for b in begins)  # one clock, from its begin
    assert trace.merge(files, str(tmp_path / "all.json")) == 0
    merged = json.loads((tmp_path / "all.json").read_text())
    assert {e["pid"] for e in merged} == {1, 2}


TOGETHER = """
import sys
import numpy as np
import gradred as gr
gr.init()
arrays = [np.ones(1 << 18, np.float32) for _ in range(24)]
gr.start_timeline(sys.argv[1])
for _ in range(5):
    handles = [gr.allreduce_async(a, gr.Max, f"call {i}", out=a) for i, a in enumerate(arrays)]
    for handle in handles:
        handle.wait()
gr.stop_timeline()
"""


def test_calls_of_a_tensor_each_run_together(run_ranks, tmp_path) -> None:
    """And no more of them than buffers are kept for; see Note [Groups that run together]."""
    result = run_ranks(2, TOGETHER, [str(tmp_path / "t.json")])
    assert result.returncode == 0, result.text
    for path in files_of(tmp_path, 2):
        reduces = [i for i in intervals(read(path).events) if i.phase == "reduce"]
        assert len(reduces) == 5 * 24
        changes = sorted([(i.begin, 1) for i in reduces] + [(i.end, -1) for i in reduces])
        most = max(itertools.accumulate(change for _, change in changes))
        assert 2 <= most <= 8


START = """
import sys
import numpy as np
import gradred as gr
gr.init()
folder = sys.argv[1]

def refused(path, part, **options):
    try:
        gr.start_timeline(path, **options)
    except gr.InvalidArgument as error:
        assert part in str(error), error
    else:
        raise AssertionError("no error")

gr.stop_timeline()  # does nothing
refused(folder + "/no/t", "rank 0 on ")
refused(folder + "/no/t", folder + "/no/t.rank1.json': No such file or directory")
refused(folder, "is a folder")
refused(f"{folder}/t{gr.rank()}", "on rank 0 and ")
refused(folder + "/t", "mark_cycles is False on rank 0 and True on rank 1",
        mark_cycles=gr.rank() == 1)
gr.allreduce(np.ones(3), name="before")
gr.start_timeline(folder + "/t", mark_cycles=True)
refused(folder + "/u", "already")
gr.allreduce(np.ones(3), name="x")
gr.stop_timeline()
gr.allreduce(np.ones(3), name="after")
gr.start_timeline(folder + "/second.json", chunks=True)
gr.allreduce(np.ones(3), name="x")
gr.shutdown()
gr.init()
gr.allreduce(np.ones(3), name="x")
"""


def test_start_and_stop(run_ranks, tmp_path) -> None:
    result = run_ranks(2, START, [str(tmp_path)])
    assert result.returncode == 0, result.text
    for rank in range(2):
        first, second = (read(str(tmp_path / f"{n}.rank{rank}.json")) for n in ("t", "second"))
        assert first.complete and second.complete
        domains = {i.domain for i in intervals(first.events)}
        # The refused start_timeline exchanges arguments while it is recorded.
        assert {d for d in domains if not d.startswith("gradred.")} == {"x"}
        marks = [e for e in first.events if e["ph"] == "i" and e["name"].endswith("round")]
        rounds = [e for e in first.events if e["ph"] == "X" and e["name"].endswith("round")]
        assert 0 < len(marks) == len(rounds)
        batches = [i.batch for i in intervals(second.events) if i.phase == "step"]
        assert batches == [1]
        names = Counter(e["name"] for e in second.events)
        # The words of rounds are summed in shared memory too.
        assert names["pack"] >= 1 and names["sum"] >= 1 and names["unpack"] == 1


def test_a_file_that_cannot_be_written_stops_nothing(run_ranks, tmp_path) -> None:
    (tmp_path / "t.rank1.json").mkdir()
    result = run_ranks(2, STEPS, env={"GRADRED_TIMELINE": str(tmp_path / "t")})
    assert result.returncode == 0, result.text
    assert f"cannot write '{tmp_path}/t.rank1.json': Is a directory" in result.text
    check_five_steps(files_of(tmp_path, 1))


KILL = (
    STEPS
    + """
import os, signal, time
if gr.rank() == 1:
    time.sleep(0.5)  # the file is written a few times a second
    os.kill(os.getpid(), signal.SIGKILL)
gr.allreduce(np.ones(3), name="never")
"""
)


def test_a_killed_rank_leaves_a_readable_file(run_ranks, tmp_path) -> None:
    result = run_ranks(2, KILL, env={"GRADRED_TIMELINE": str(tmp_path / "t")})
    assert result.returncode != 0
    files = files_of(tmp_path, 2)
    check_five_steps(files[1:])
    survivor, killed = read_all(files)
    assert survivor.complete and not killed.complete and killed.cut_nbytes == 0
    assert [e["args"]["text"] for e in survivor.events if e["name"] == "abort"], result.text
    open_ones = {e["name"] for e in survivor.events if e["ph"] == "b"}
    assert "never: negotiation" in open_ones


@pytest.mark.parametrize("ahead", [0, 12_345_678, -987_654_321])
def test_clocks(ahead: int) -> None:
    """Stamps of an exchange that takes 100 to 180 units, with clocks that differ."""
    entered = [[1000, 2000, 3000], [1040 + ahead, 2010 + ahead, 3080 + ahead]]
    left = [[1150, 2110, 3180], [1160 + ahead, 2130 + ahead, 3170 + ahead]]
    stamps = np.array([[e, x] for e, x in zip(entered, left, strict=True)], np.int64)
    origin, offset, error = distance(stamps, ["a", "b"], 1)
    assert origin == 1000
    assert abs(offset + ahead) <= error <= 120
    assert distance(stamps, ["a", "b"], 0) == (1000, 0, 0)
    assert distance(stamps, ["a", "a"], 1) == (1000, 0, 0)
