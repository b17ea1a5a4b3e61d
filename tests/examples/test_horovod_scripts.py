"""The scripts of examples/horovod_scripts, one after the other in one job."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "horovod_scripts"
# The one with sessions last: it switches eager execution off for good.
SCRIPTS = ("keras_fit", "custom_loop", "segmentation", "session")

RUN_ALL = """
import os, runpy, sys

folder, work = sys.argv[1:3]
os.chdir(work)
for name in sys.argv[3:]:
    runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
"""
LINE = re.compile(r"^rank (\d): loss ([\d.]+) to ([\d.]+), weights (\w+)$", re.M)


def test_scripts(run_ranks, tmp_path: Path) -> None:
    """Each ends with the same weights on all ranks, and with a smaller loss."""
    work = tmp_path / "work"
    work.mkdir()
    result = run_ranks(2, RUN_ALL, [str(FOLDER), str(work), *SCRIPTS], timeout=200)
    assert result.codes == [0, 0], result.text
    lines = [LINE.findall(out) for out in result.out]
    assert [len(found) for found in lines] == [len(SCRIPTS)] * 2, result.text
    for script, *ranks in zip(SCRIPTS, *lines, strict=True):
        assert [rank for rank, *_ in ranks] == ["0", "1"], script
        assert ranks[0][3] == ranks[1][3], f"{script}: weights differ"
        for _, first, last, _ in ranks:
            assert float(last) < 0.5 * float(first), (script, ranks)
    written = {str(p.relative_to(work)) for p in work.rglob("*")}
    assert {"checkpoints/4.weights.h5", "checkpoints/segmentation.keras"} <= written


def test_all_scripts_are_run() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(SCRIPTS)
