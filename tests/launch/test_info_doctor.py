"""What ``gradred info`` and ``gradred doctor`` say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradred.launch import doctor, info, mpirun


def test_info_names_versions_and_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADRED_LOG_LEVEL", "loud")
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: None)
    assert info.main() == 0
    text = capsys.readouterr().out
    assert "mpirun            none in this environment or on PATH\n" in text
    assert sys.executable in text
    assert "  GRADRED_WIRE = none\n" in text
    assert (
        "  GRADRED_LOG_LEVEL = 'loud' (refused: GRADRED_LOG_LEVEL='loud': expected one of" in text
    )


def test_info_prints_the_table_of_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = info.algorithm_lines()
    assert "  between 4" in lines and "  between 6" in lines
    assert any(
        line.startswith("    allreduce from 0 bytes: recursive_doubling (") for line in lines
    )
    monkeypatch.setenv("GRADRED_ALGORITHMS", "allreduce:0=ring")
    assert "GRADRED_REPRODUCIBLE=0" in info.algorithm_lines()[0]
    monkeypatch.setenv("GRADRED_REPRODUCIBLE", "0")
    ring = "    allreduce from 0 bytes: ring, order of sums changes with sizes"
    assert any(line.startswith(ring) for line in info.algorithm_lines())


@pytest.mark.parametrize(
    ("program", "works", "text"),
    [
        ("print('noise'); print('1.2')", True, "1.2"),
        ("import no_such_module", False, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys; sys.exit('libx.so: cannot open')", False, "libx.so: cannot open"),
        ("import os, signal; os.kill(os.getpid(), 11)", False, "ended by signal 11"),
        ("import sys; sys.exit(3)", False, "exit code 3"),
    ],
)
def test_reasons(program: str, works: bool, text: str) -> None:
    check = doctor.Check("thing", [sys.executable, "-S", "-c", program], True)
    assert doctor.examine(check) == (works, text)


@pytest.mark.parametrize(("needed", "code", "mark"), [(True, 1, "BROKEN"), (False, 0, "-")])
def test_only_needed_parts_are_faults(
    needed: bool,
    code: int,
    mark: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = doctor.Check("thing", [sys.executable, "-S", "-c", "1 / 0"], needed)
    good = doctor.Check("other", [sys.executable, "-S", "-c", "print('fine')"], True)
    monkeypatch.setattr(doctor, "checks", lambda: [bad, good])
    assert doctor.main() == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [mark, "thing", "ZeroDivisionError:", "division", "by", "zero"]
    assert lines[1].split() == ["ok", "other", "fine"]


def test_what_is_needed_follows_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: None)
    needed = {check.name: check.needed for check in doctor.checks(lambda _: False)}
    assert needed["native part"] and not needed["TensorFlow ops"] and not needed["2 ranks, mpirun"]
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: "/bin/mpirun")
    needed = {check.name: check.needed for check in doctor.checks(lambda _: True)}
    assert needed["TensorFlow ops"] and needed["2 ranks, mpirun"] and not needed["NCCL"]


def test_each_line_loads_the_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9: with something in its place that cannot be loaded, its line is not ok, and says why."""
    for name in ("numpy", "mpi4py", "tensorflow", "keras"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('lib{name}.so is gone')")
    checks = {check.name: check for check in doctor.checks(lambda _: True)}
    for name in ("NumPy", "native part", "shared memory"):
        works, text = doctor.examine(checks[name])
        assert works, text
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for line, name in (
        *(("NumPy", "numpy"), ("mpi4py", "mpi4py"), ("TensorFlow", "tensorflow")),
        *(("Keras", "keras"), ("TensorFlow ops", "numpy")),
    ):
        works, text = doctor.examine(checks[line])
        assert not works and f"lib{name}.so is gone" in text, (line, text)
    for line, library in (("NCCL", "libnccl.so.2"), ("CUDA driver", "libcuda.so.1")):
        works, text = doctor.examine(checks[line])
        assert works or library in text, text


LAUNCHERS = {
    "srun": ("echo slurm 23.11.1", True, "srun slurm 23.11.1"),
    "jsrun": ("echo 10.3.0; echo more", True, "jsrun 10.3.0"),
    "horovodrun": ("echo 0.28.1; echo '    [X] MPI'", True, "horovodrun 0.28.1"),
    "horovodrun of a build without MPI": (
        "echo 0.28.1; echo '    [ ] MPI'",
        *(False, "was built without MPI: it refuses --mpi"),
    ),
    "srun that cannot run": ("echo no controller >&2; exit 1", False, "no controller"),
    "srun that says nothing": ("exit 3", False, "srun --version: 3"),
    "jsrun that is not there": (None, False, "jsrun is not in this environment or on PATH"),
}


@pytest.mark.parametrize("case", list(LAUNCHERS))
def test_launchers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, works, said = LAUNCHERS[case]
    name = case.split()[0]
    if text is not None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    checks = {check.name: check for check in doctor.checks(lambda _: False)}
    *python, program = checks[name].command
    program = program.replace("sys.prefix", repr(str(tmp_path)))  # whatever is in this environment
    ok, reason = doctor.examine(doctor.Check(name, [*python, program], False))
    assert (ok, reason.endswith(said)) == (works, True), reason
    assert not checks[name].needed  # nothing is broken without it
