"""The lines of srun and jsrun, hosts of LSF, and which launcher is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradred.launch import jsrun, launchers, srun
from gradred.launch.errors import UsageError
from gradred.launch.hosts import parse_hosts
from gradred.launch.launchers import Job


def job(size: int, folder: Path, hosts: str = "", **more) -> Job:
    values = {"environ": {}, "exported": (), "command": ["python", "train.py"], **more}
    return Job(size=size, hosts=parse_hosts(hosts) if hosts else [], folder=str(folder), **values)


END = ["--cpu-bind=cores", "--kill-on-bad-exit=1", "--export=ALL", "python", "train.py"]


def test_srun(tmp_path: Path) -> None:
    line, more = srun.compose("/bin/srun", "pmix", job(4, tmp_path))
    assert line == ["/bin/srun", "--ntasks=4", "--mpi=pmix", *END]
    assert more == {}


def test_srun_on_hosts(tmp_path: Path) -> None:
    line, more = srun.compose("srun", "", job(8, tmp_path, "a:4,b:4", words=["--label"]))
    where = ["--nodes=2", "--nodelist=a,b", "--ntasks-per-node=4"]
    assert line == ["srun", "--ntasks=8", *where, *END[:-2], "--label", *END[-2:]]
    assert more == {}
    line, more = srun.compose("srun", "", job(5, tmp_path, "a:3,b:4,c:4"))
    where = ["--nodes=2", "--nodelist=a,b", "--distribution=arbitrary"]
    assert line == ["srun", "--ntasks=5", *where, *END]
    assert Path(more["SLURM_HOSTFILE"]).read_text() == "a\na\na\nb\nb\n"


def test_type_of_mpi(tmp_path: Path) -> None:
    for version, expected in (
        ("mpirun (Open MPI) 5.0.9", "pmix"),
        ("HYDRA build details:\n    Version:  4.2", "pmi2"),
        ("nothing known", "pmix"),
    ):
        path = tmp_path / expected / version[:3]
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\nprintf '{version}\n'")
        path.chmod(0o755)
        assert srun.mpi_type([], str(path)) == expected
    assert srun.mpi_type([], None) == "pmix"
    assert srun.mpi_type(["--mpi=cray_shasta"], None) == ""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LSB_MCPU_HOSTS": "batch 1 a 4 b 4"}, {"a": 4, "b": 4}),
        ({"LSB_MCPU_HOSTS": "a 4 b 4"}, {"a": 4, "b": 4}),
        ({"LSB_MCPU_HOSTS": "a 1 b 1"}, {"a": 1, "b": 1}),
        ({"LSB_HOSTS": "batch a a b b"}, {"a": 2, "b": 2}),
        ({"LSB_HOSTS": "a"}, {"a": 1}),
        ({}, {}),
    ],
)
def test_hosts_of_lsf(environ: dict[str, str], expected: dict[str, int]) -> None:
    assert {host.name: host.cores for host in jsrun.lsf_hosts(environ)} == expected


def test_hosts_of_lsf_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("batch\na\na\n")
    assert jsrun.lsf_hosts({"LSB_DJOB_HOSTFILE": str(file)}) == [jsrun.LsfHost("a", 2)]
    with pytest.raises(UsageError, match="LSB_DJOB_HOSTFILE"):
        jsrun.lsf_hosts({"LSB_DJOB_HOSTFILE": str(tmp_path / "none")})
    with pytest.raises(UsageError, match="LSB_MCPU_HOSTS: 'b' behind a"):
        jsrun.lsf_hosts({"LSB_MCPU_HOSTS": "a b 1"})


LSF = {"LSB_MCPU_HOSTS": "batch 1 a 42 b 42"}


def test_jsrun_by_resource_sets(tmp_path: Path) -> None:
    line = jsrun.compose("jsrun", job(12, tmp_path, environ=LSF, gpus=1, words=["-E", "X"]))
    assert " ".join(line) == (
        "jsrun --nrs 12 --tasks_per_rs 1 --cpu_per_rs 7 --gpu_per_rs 1 --rs_per_host 6 "
        "--launch_distribution packed --bind rs -E X python train.py"
    )


def test_jsrun_by_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsrun, "threads_of_a_core", lambda: 4)
    line = jsrun.compose("jsrun", job(3, tmp_path, "b:1,a:2", environ=LSF, gpus=2, cores=2))
    assert line == ["jsrun", "--erf_input", str(tmp_path / "jsrun.ranks"), "python", "train.py"]
    assert (tmp_path / "jsrun.ranks").read_text().splitlines() == [
        "overlapping_rs: allow",
        "cpu_index_using: logical",
        "rank: 0: { hostname: b ; cpu: {0-7} ; gpu: {0-1} ; mem: * }",
        "rank: 1: { hostname: a ; cpu: {0-7} ; gpu: {0-1} ; mem: * }",
        "rank: 2: { hostname: a ; cpu: {8-15} ; gpu: {2-3} ; mem: * }",
    ]


def test_jsrun_where_ranks_do_not_divide(tmp_path: Path) -> None:
    line = jsrun.compose("jsrun", job(3, tmp_path, environ=LSF))
    assert line[:2] == ["jsrun", "--erf_input"]
    text = (tmp_path / "jsrun.ranks").read_text()
    assert [text.count(f"hostname: {host} ;") for host in "ab"] == [2, 1]
    assert "gpu" not in text


@pytest.mark.parametrize(
    ("hosts", "more", "message"),
    [
        ("", {}, "no LSF job here"),
        ("a:2", {}, "the cores of host a are not known: --cores N"),
        ("c:2", {"environ": LSF}, "the LSF job has no host c; it has a, b"),
        ("a:2", {"environ": LSF, "cores": 22}, "--cores 22: host a has 42 cores for 2 ranks"),
        ("a:2", {"environ": {"LSB_MCPU_HOSTS": "a 1"}}, "host a has 1 cores for 2 ranks"),
    ],
)
def test_jsrun_refuses(tmp_path: Path, hosts: str, more: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        jsrun.compose("jsrun", job(2, tmp_path, hosts, **more))


def test_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="srun is not on PATH"):
        launchers.choose("srun", [])
    with pytest.raises(UsageError, match="--launcher /no/jsrun: /no/jsrun is no program"):
        launchers.choose("/no/jsrun", [])
    for name in ("srun", "jsrun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        for how in (name, str(tmp_path / name)):
            chosen = launchers.choose(how, [])
            assert chosen is not None
            assert (chosen.title, chosen.binds) == (name, True)
    assert launchers.choose("local", []) is None
