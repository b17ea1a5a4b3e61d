"""The parts of the benchmarks' harness."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bench import chart, limits
from bench.job import Job, JobError, Jobs, alternate
from bench.measure import percentile, summarize
from bench.report import Report, Target, nbytes_text, table, time_text


def block(times: list[float], **more: float) -> dict:
    figures = {"wrong": 0, "checked": 0, "cpu_s": 0.0, "engine_cpu_s": 0.0, "faults": 0}
    return {"times_s": times, **figures, "extra": {}, **more}


def test_an_iteration_takes_as_long_as_on_the_slowest_rank() -> None:
    figures = summarize([[block([1.0, 5.0, 3.0]), block([2.0, 1.0, 3.0])]])
    assert (figures.median_s, figures.min_s, figures.p99_s) == (3.0, 2.0, 5.0)
    assert figures.iterations == 3


def test_figures_are_a_step_and_rank() -> None:
    ranks = [block([1.0, 1.0], faults=6, wrong=1), block([1.0, 1.0], faults=2, wrong=2)]
    figures = summarize([ranks, ranks])
    assert (figures.faults, figures.wrong) == (2.0, 6)
    assert figures.medians_s == [1.0, 1.0]


def test_percentile() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0
    assert percentile(list(range(100)), 0.99) == 99
    assert percentile([7.0], 0.99) == 7.0


def test_contestants_alternate_and_each_gets_its_blocks() -> None:
    calls: list[str] = []
    results = alternate(["a", "b", "c"], 4, lambda name: calls.append(name) or len(calls))
    assert {name: len(blocks) for name, blocks in results.items()} == {"a": 4, "b": 4, "c": 4}
    for first in range(0, 12, 3):
        assert sorted(calls[first : first + 3]) == ["a", "b", "c"]
    assert len({tuple(calls[first : first + 3]) for first in range(0, 12, 3)}) > 1


def test_texts() -> None:
    assert [time_text(t) for t in (2.0, 0.0125, 3.21e-5)] == ["2 s", "12.5 ms", "32.1 us"]
    assert [nbytes_text(n) for n in (4, 65536, 3 << 20)] == ["4 B", "64 KB", "3 MB"]
    assert table(["a", "bb"], [["ccc", "1"]]).splitlines()[2] == "ccc   1"


def test_pictures_are_xml() -> None:
    series = {"a & b": {1.0: 2.0, 4.0: 30.0}, "c": {1.0: 1.0}}
    for text in (
        chart.lines("sizes", "bytes", "us", series, {4.0: "four"}),
        chart.bars("cost", "ms", {"a < b": 1.0, "none": 0.0}),
    ):
        assert ElementTree.fromstring(text).tag.endswith("svg")


def test_a_result_names_machine_and_targets(tmp_path: Path, capsys) -> None:
    report = Report("name", {"ranks": 2}, targets=[Target("t", 2.0, 1.0, "us"), Target("u", 1, 1)])
    report.write(tmp_path / "folder" / "result.json")
    result = json.loads((tmp_path / "folder" / "result.json").read_text())
    assert [t["reached"] for t in result["targets"]] == [False, True]
    assert {"cpu", "cores"} <= result["machine"].keys()
    assert "NOT reached" in capsys.readouterr().out


def states(job: Job) -> set[str]:
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in job.pids}


@pytest.mark.launch
def test_limits_are_kept_with_what_was_not_reached(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "MACHINE", {})
    report = Report("timeline", {})
    report.targets = [Target("steps: on over off", value, 1.01) for value in (1.0, 1.02)]
    report.write(tmp_path / "r.json")
    reached, missed = json.loads((tmp_path / "r.json").read_text())["targets"]
    assert "limited_by" not in reached
    limit = limits.find("timeline", "steps: on over off")
    assert limit is not None
    assert (missed["limited_by"], missed["tried"]) == (limit.by, limit.tried)


def test_results_say_what_limits_each_figure_that_is_not_reached() -> None:
    for path in sorted(Path(limits.__file__).parents[1].glob("results/*.json")):
        content = json.loads(path.read_text())
        for target in content["targets"]:
            told = target.get("limited_by") and target.get("tried")
            assert target["reached"] or told, f"{path.name}: {target['what']}"


def test_ranks_take_turns_and_say_what_fails() -> None:
    with Jobs() as jobs:
        for name in ("a", "b"):
            jobs.start(name, 2, launcher="local")
        with jobs.turn("a") as job:
            assert job.call("bench.report.commit") == job.call("bench.report.commit")
            assert states(jobs["b"]) == {"T"}
            with pytest.raises(JobError, match=r"(?s)a: rank 0: contestants.begin:.*KeyError"):
                job.call("contestants.begin", kind="nobody")
        assert states(jobs["a"]) == {"T"}
        with jobs.turn("b") as job, pytest.raises(JobError, match="b: rank 0 has ended"):
            job.call("os._exit", status=3)
