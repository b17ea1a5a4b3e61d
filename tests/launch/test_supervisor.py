"""Cores and places of ranks, and how an end is described."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradred.launch import supervisor


def test_cores_group_siblings(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert supervisor.physical_cores({0, 1, 2, 3}, str(tmp_path)) == [[0, 2], [1, 3]]
    assert supervisor.physical_cores({1, 2}, str(tmp_path)) == [[1], [2]]
    assert supervisor.physical_cores({0, 9}, str(tmp_path)) == [[0], [9]]


@pytest.mark.parametrize(
    ("cores", "size", "shares"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1], [2, 3]]),
        (3, 3, [[0], [1], [2]]),
        (2, 1, [[0, 1]]),
        (2, 3, [[], [], []]),
    ],
)
def test_equal_shares(cores: int, size: int, shares: list[list[int]]) -> None:
    all_cores = [[cpu] for cpu in range(cores)]
    for rank in range(size):
        share = supervisor.share_of_cores(all_cores, rank, size)
        assert [cpu for core in share for cpu in core] == shares[rank]


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            (5, 1, 4),
        ),
        ({"PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, (2, 0, 2)),
        ({"GRADRED_LOCAL_RANK": "1", "GRADRED_LOCAL_SIZE": "2"}, (1, 1, 2)),
        (
            {
                "JSM_NAMESPACE_RANK": "7",
                "JSM_NAMESPACE_LOCAL_RANK": "1",
                "JSM_NAMESPACE_LOCAL_SIZE": "6",
                "OMPI_COMM_WORLD_RANK": "7",
            },
            (7, 1, 6),
        ),
        (
            {
                "PMI_RANK": "9",
                "SLURM_PROCID": "9",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
            },
            (9, 1, 3),
        ),
        ({"PMI_RANK": "3"}, (3, 0, 1)),
        ({}, (0, 0, 1)),
    ],
)
def test_places(environ: dict[str, str], place: tuple[int, int, int]) -> None:
    assert tuple(supervisor.find_place(environ).values()) == place


def test_ends() -> None:
    assert supervisor.describe(0) == "exit code 0"
    assert supervisor.describe(3) == "exit code 3"
    assert supervisor.describe(-9) == "signal 9 (SIGKILL)"
    assert supervisor.describe(-11) == "signal 11 (SIGSEGV)"
    assert supervisor.describe(-200) == "signal 200"
