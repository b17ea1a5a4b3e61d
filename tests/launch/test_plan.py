"""``gradred plan``, and the files that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradred import plan_file
from gradred.errors import InvalidArgument
from gradred.launch import cli

DOMAIN = {
    "domain": "optimizer.0",
    "process_set": 0,
    "planned": True,
    "labels": ["a/kernel", "a/<bias>", "b/kernel"],
    "counts": [100, 10, 1000],
    "nbytes": [400, 40, 4000],
    "order": [2, 0, 1],
    "group_ends": [1, 3],
    "batches": 40,
    "changes": 1,
    "ready_ns": [3000000, 3100000, 1000000],
    "predicted_ns": [[1050000, 1500000], [3150000, 3300000]],
    "measured_ns": [[1060000, 1600000], [3160000, 3310000]],
    "cost_nbytes": [4096, 16384],
    "cost_ns": [40000, 60000],
    "round_ns": 50000,
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    plan_file.write(tmp_path / "plan.json", 2, [DOMAIN, {**DOMAIN, "domain": "tape"}])
    return str(tmp_path / "plan.json")


def test_what_is_written_is_read(path: str) -> None:
    assert plan_file.read(path) == {"optimizer.0": DOMAIN, "tape": {**DOMAIN, "domain": "tape"}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"order": [2, 0, 0]}, "each position once"),
        ({"group_ends": [1, 1, 3]}, "do not ascend"),
        ({"group_ends": [1]}, "do not ascend to 3"),
        ({"group_ends": []}, "do not ascend"),
        ({"counts": [1, 2]}, "2 values for 3 entries"),
        ({"planned": 1}, "'planned': expected bool"),
        ({"labels": "abc"}, "a list of str"),
        ({"measured_ns": [[1, 2]]}, "1 times for 2 groups"),
        ({"predicted_ns": [[1, 2], [3]]}, "expected [start, end]"),
        ({"ready_ns": [1]}, "1 times for 3 entries"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, change: dict, problem: str) -> None:
    file = tmp_path / "bad.json"
    content = {"format": plan_file.FORMAT, "size": 2, "domains": [DOMAIN, {**DOMAIN, **change}]}
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument) as caught:
        plan_file.read(file)
    assert problem in str(caught.value)
    assert "bad.json: domain 1" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "else"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other").write_text(text)
    with pytest.raises(InvalidArgument, match="other: "):
        plan_file.read(tmp_path / "other")


def test_show(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "show", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("optimizer.0: 3 entries, 4440 bytes on the wire, 2 groups; planned")
    assert lines[3].split() == ["1", "2", "440", "3.100", "3.150..3.300", "3.160..3.310"]
    plan_file.write(tmp_path / "empty.json", 2, [])
    assert cli.main(["plan", "show", str(tmp_path / "empty.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/empty.json: holds no plan\n"


def test_check(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "check", path]) == 0
    assert cli.main(["plan", "check", path, str(tmp_path / "none")]) == 1
    assert "2 domains" in capsys.readouterr().out


def test_draw(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    assert cli.main(["plan", "draw", path, "-o", str(picture), "--domain", "tape"]) == 0
    root = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}line")) == 3
    assert len(root.findall(f"{space}rect")) == 1 + 2 * 2
    assert cli.main(["plan", "draw", path, "-o", str(picture), "--domain", "x"]) == 2
    assert "has optimizer.0, tape" in capsys.readouterr().err
