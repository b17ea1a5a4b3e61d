"""Which mpirun it is, and the line that is composed for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradred.launch import hosts, mpirun
from gradred.launch.errors import UsageError
from gradred.launch.hosts import Host

VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n": (
        "Open MPI",
        "5.0.11",
    ),
    "mpirun (Open MPI) 4.1.4\n": ("Open MPI", "4.1.4"),
    "mpirun (Open MPI) 5.0.0rc12\n": ("Open MPI", "5.0.0rc12"),
    "mpiexec (OpenRTE) 3.1.3\n": ("Open MPI", "3.1.3"),
    "mpirun (IBM Spectrum MPI) 10.3.1.2rtm0\n": ("Spectrum MPI", "10.3.1.2rtm0"),
    "HYDRA build details:\n    Version:                                 4.3.0\n    CC: cc\n": (
        "MPICH",
        "4.3.0",
    ),
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515\nCopyright\n": (
        "Intel MPI",
        "2021.13",
    ),
}
OPEN_MPI = mpirun.Mpirun("/opt/mpirun", "Open MPI", "5.0.11")
MPICH = mpirun.Mpirun("/opt/mpirun", "MPICH", "5.0.2")


@pytest.mark.parametrize("text", VERSIONS)
def test_family(text: str) -> None:
    assert mpirun.family_of(text) == VERSIONS[text]


def test_unknown_family() -> None:
    with pytest.raises(UsageError, match=r"no known family; it says 'mpirun 1\.0'"):
        mpirun.family_of("mpirun 1.0\n")


@pytest.mark.parametrize("family", ["Open MPI", "Spectrum MPI"])
@pytest.mark.parametrize("version", ["4.1.4", "5.0.11"])
def test_open_mpi_on_one_machine(family: str, version: str) -> None:
    launcher = mpirun.Mpirun("/opt/mpirun", family, version)
    line = mpirun.compose(
        launcher, 3, [], {"GRADRED_X": "1"}, [], ["python", "train.py", "-n", "5"]
    )
    expected = "/opt/mpirun -n 3 --map-by slot:OVERSUBSCRIBE --bind-to none python train.py -n 5"
    assert line == expected.split()


def test_open_mpi_on_several_machines() -> None:
    environ = {"PATH": "/bin", "HOME": "/h", "GRADRED_TIMEOUT": "5", "TF_NUM_THREADS": "2"}
    nodes = [Host("node1", 4), Host("node2", 2)]
    line = mpirun.compose(OPEN_MPI, 6, nodes, environ, ["LANG"], ["a.out"])
    expected = (
        "/opt/mpirun -n 6 --map-by slot:OVERSUBSCRIBE --bind-to none --host node1:4,node2:2 "
        "-x GRADRED_TIMEOUT -x LANG -x PATH -x TF_NUM_THREADS a.out"
    )
    assert line == expected.split()


@pytest.mark.parametrize("family", ["MPICH", "Intel MPI"])
def test_hydra(family: str) -> None:
    launcher = mpirun.Mpirun("/opt/mpirun", family, "4.3")
    assert mpirun.compose(launcher, 2, [], {}, ["LANG"], ["a.out"]) == [
        *("/opt/mpirun", "-n", "2", "a.out")
    ]
    line = mpirun.compose(launcher, 6, [Host("node1", 4), Host("node2", 2)], {}, ["A"], ["a.out"])
    expected = "/opt/mpirun -n 6 -hosts node1:4,node2:2 -genvlist A a.out"
    assert line == expected.split()


def test_this_machine_named_as_host() -> None:
    line = mpirun.compose(OPEN_MPI, 2, [Host("localhost", 2)], {"PATH": "/bin"}, [], ["a.out"])
    assert "--host localhost:2" in " ".join(line)
    assert "-x" not in line


def test_root() -> None:
    assert mpirun.root_variables(OPEN_MPI, 0) == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    assert mpirun.root_variables(OPEN_MPI, 1000) == {}
    assert mpirun.root_variables(MPICH, 0) == {}


def test_a_rank_can_start_a_job() -> None:
    environ = {
        "PATH": "/bin",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_num_procs": "2",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PMIX_RANK": "0",
        "PMI_FD": "7",
        "GRADRED_LOCAL_RANK": "1",
        "GRADRED_JOB_DIR": "/tmp/x",
        "GRADRED_TIMEOUT": "3",
    }
    assert mpirun.clean_environment(environ) == {
        "PATH": "/bin",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "GRADRED_TIMEOUT": "3",
    }
    alone = {"PMI_NAME": "mine"}
    assert mpirun.clean_environment(alone) == alone


def test_hosts() -> None:
    assert hosts.parse_hosts("a:2, b.example.org:3,c") == [
        Host("a", 2),
        Host("b.example.org", 3),
        Host("c", 1),
    ]


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:-1", "a:x", ":2", "a,a", "a:2,,b", "-x"])
def test_bad_hosts(text: str) -> None:
    if text == "a:":
        assert hosts.parse_hosts(text) == [Host("a", 1)]
        return
    with pytest.raises(UsageError, match="host"):
        hosts.parse_hosts(text)


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# a cluster\nnode1 slots=4\nnode2:2  # two\n\nnode3\n")
    assert hosts.read_hostfile(str(file)) == [Host("node1", 4), Host("node2", 2), Host("node3", 1)]
    file.write_text("# nothing\n")
    with pytest.raises(UsageError, match="names no host"):
        hosts.read_hostfile(str(file))
    with pytest.raises(UsageError, match="No such file"):
        hosts.read_hostfile(str(tmp_path / "none"))
