"""Process sets of the neutral API."""

from __future__ import annotations

import numpy as np
import pytest

import gradred as gr

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


@pytest.fixture(scope="module")
def sets(size: int) -> list[gr.ProcessSet]:
    """Rank 0, the last two, and everybody under another id."""
    return [gr.add_process_set(ranks) for ranks in ([0], [size - 1, size - 2], range(size))]


def test_global_set(rank: int, size: int) -> None:
    everybody = gr.global_process_set
    assert everybody.ranks == list(range(size))
    assert (everybody.size(), everybody.rank(), everybody.included()) == (size, rank, True)
    assert everybody.process_set_id == 0


def test_members_reduce_among_themselves(rank: int, sets: list[gr.ProcessSet]) -> None:
    ids = [s.process_set_id for s in sets]
    assert len(set(ids)) == 3
    assert 0 not in ids
    for process_set in sets:
        if not process_set.included():
            continue
        ranks = process_set.ranks
        assert process_set.size() == len(ranks)
        assert ranks[process_set.rank()] == rank
        for _ in range(5):
            total = gr.allreduce(np.full(3, rank, np.int32), gr.Sum, process_set=process_set)
            assert (total == sum(ranks)).all()
        gathered = gr.allgather(np.full((rank, 1), rank), process_set=process_set)
        assert gathered[:, 0].tolist() == [r for r in ranks for _ in range(r)]
        root = ranks[-1]
        assert gr.broadcast(np.array(rank), root, process_set=process_set) == root
        gr.barrier(process_set=process_set)


def test_others_are_refused(rank: int, size: int, sets: list[gr.ProcessSet]) -> None:
    if rank != 0:
        match = rf"'x'.*rank {rank} is no member of process set {sets[0].process_set_id}.*ranks 0"
        with pytest.raises(gr.InvalidArgument, match=match):
            gr.allreduce(np.zeros(2), name="x", process_set=sets[0])
        with pytest.raises(gr.InvalidArgument, match="no member"):
            sets[0].rank()
    else:
        with pytest.raises(gr.InvalidArgument, match=f"root_rank={size - 1}"):
            gr.broadcast(np.zeros(2), size - 1, process_set=sets[0])


def test_bad_sets(size: int) -> None:
    for ranks in ([], [0, 0], [-1, 0]):
        with pytest.raises(gr.InvalidArgument, match="ProcessSet"):
            gr.ProcessSet(ranks)
    with pytest.raises(gr.InvalidArgument, match=f"rank {size} is outside"):
        gr.add_process_set([0, size])
    with pytest.raises(gr.InvalidArgument, match="not registered"):
        gr.allreduce(np.zeros(2), process_set=gr.ProcessSet([0]))


def test_set_and_world_at_once(rank: int, size: int, sets: list[gr.ProcessSet]) -> None:
    pair = sets[1]
    for i in range(20):
        if pair.included():
            assert gr.allreduce(i, gr.Sum, process_set=pair) == 2 * i
        assert gr.allreduce(i, gr.Sum) == size * i
