"""Process sets of the neutral API."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import gradred as gr
from gradred import _core

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    gr.init()


@pytest.fixture
def sets(size: int) -> Iterator[list[gr.ProcessSet]]:
    """Rank 0, the last two, and everybody under another id."""
    added = [gr.add_process_set(ranks) for ranks in ([0], [size - 1, size - 2], range(size))]
    yield added
    for process_set in added:
        assert gr.remove_process_set(process_set)


def test_global_set(rank: int, size: int) -> None:
    everybody = gr.global_process_set
    assert everybody.ranks == list(range(size))
    assert (everybody.size(), everybody.rank(), everybody.included()) == (size, rank, True)
    assert everybody.process_set_id == 0
    assert gr.remove_process_set(everybody) is False
    assert everybody.size() == size


def use(process_set: gr.ProcessSet, rank: int) -> None:
    """Each kind of collective, where this rank is a member."""
    if not process_set.included():
        return
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
    exchanged = gr.alltoall(np.full(len(ranks), rank), process_set=process_set)
    assert exchanged.tolist() == ranks
    mine = gr.reducescatter(np.arange(len(ranks)), gr.Sum, process_set=process_set)
    assert mine.tolist() == [len(ranks) * process_set.rank()]
    gr.barrier(process_set=process_set)
    assert gr.allgather_object(rank, process_set=process_set) == ranks


def test_members_reduce_among_themselves(rank: int, sets: list[gr.ProcessSet]) -> None:
    ids = [s.process_set_id for s in sets]
    assert len(set(ids)) == 3
    assert 0 not in ids
    for process_set in sets:
        use(process_set, rank)


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


def test_bad_sets(rank: int, size: int, sets: list[gr.ProcessSet]) -> None:
    for ranks in ([], [0, 0], [-1, 0], ["0"], "01", [0.5], 3, None):
        with pytest.raises(gr.InvalidArgument, match="ProcessSet"):
            gr.ProcessSet(ranks)
    assert gr.ProcessSet([np.int32(1), 0]).ranks == [0, 1]
    with pytest.raises(gr.InvalidArgument, match=f"rank {size} is outside"):
        gr.add_process_set([0, size])
    with pytest.raises(gr.InvalidArgument, match="not registered"):
        gr.allreduce(np.zeros(2), process_set=gr.ProcessSet([0]))
    first = sets[0].process_set_id
    with pytest.raises(gr.InvalidArgument, match=rf"set {first} has the ranks \[0\] already"):
        gr.add_process_set([0])
    assert gr.add_process_set(sets[0]) is sets[0]
    for wrong in ([0], 1, None):
        with pytest.raises(gr.InvalidArgument, match="remove_process_set: expected a ProcessSet"):
            gr.remove_process_set(wrong)
    assert gr.remove_process_set(gr.ProcessSet([0])) is False
    use(sets[0], rank)


def test_set_and_world_at_once(rank: int, size: int, sets: list[gr.ProcessSet]) -> None:
    pair = sets[1]
    for i in range(20):
        if pair.included():
            assert gr.allreduce(i, gr.Sum, process_set=pair) == 2 * i
        assert gr.allreduce(i, gr.Sum) == size * i


def test_overlapping_sets_from_threads(rank: int, size: int, sets: list[gr.ProcessSet]) -> None:
    """Each thread waits for its set alone, in an order of its own."""
    errors = []

    def reduce(process_set: gr.ProcessSet) -> None:
        try:
            name = f"thread.{process_set.process_set_id}"
            for i in range(30):
                x = np.full(1000 + i, rank, np.int64)
                total = gr.allreduce(x, gr.Sum, name=name, process_set=process_set)
                assert (total == sum(process_set.ranks)).all()
        except BaseException as error:
            errors.append(error)

    mine = [s for s in [*sets, gr.global_process_set] if s.included()]
    threads = [threading.Thread(target=reduce, args=(s,)) for s in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert errors == []


def test_a_removed_set(rank: int, size: int) -> None:
    ranks = list(range(size - 1))
    old = gr.ProcessSet(reversed(ranks))
    ids = []
    for _ in range(3):  # the same object again
        assert gr.add_process_set(old) is old
        ids.append(old.process_set_id)
        use(old, rank)
        rounds = gr.metrics().rounds
        assert gr.remove_process_set(old) is True
        assert gr.metrics().rounds >= rounds
        assert gr.remove_process_set(old) is False
        for call in (old.size, old.rank, old.included, lambda: gr.barrier(process_set=old)):
            with pytest.raises(gr.InvalidArgument, match=r"\] has been removed"):
                call()
    assert len(set(ids)) == 3  # no id twice: a traced graph must not run on another set
    entry = {"label": "x", "op": "barrier", "reduce_op": "sum", "dtype": "uint8", "wire": "uint8"}
    entry |= {"shape": [], "prescale": 1.0, "postscale": 1.0, "root": 0}
    with pytest.raises(gr.InvalidArgument, match=f"process set {ids[0]} has been removed"):
        _core.run(_core.Spec("late", ids[0], [entry], []), [None])
    with pytest.raises(gr.InvalidArgument, match="no process set 100000"):
        _core.process_set_ranks(100000)


def test_removal_ends_what_cannot_be_whole(job, rank: int, size: int) -> None:
    pair = gr.add_process_set([0, size - 1])
    outcome: list[object] = []

    def reduce() -> None:
        try:
            outcome.append(gr.allreduce(np.ones(3), gr.Sum, name="half", process_set=pair))
        except gr.Error as error:
            outcome.append(error)

    thread = threading.Thread(target=reduce)
    if rank == 0:
        thread.start()
    job.barrier()
    assert gr.remove_process_set(pair) is True
    if rank == 0:
        thread.join(30)
        [error] = outcome
        assert isinstance(error, gr.Abandoned), error
        assert "has been removed" in str(error) and "'half'" in str(error)
    assert gr.allreduce(1, gr.Sum) == size


def test_ranks_that_do_different_things(job, rank: int, size: int) -> None:
    a, b = gr.add_process_set([0]), gr.add_process_set([size - 1])
    with pytest.raises(gr.Mismatch, match="process set") as caught:
        gr.remove_process_set(a if rank == 0 else b)
    assert len(set(job.exchange(str(caught.value)))) == 1
    with pytest.raises(gr.Mismatch, match="process set"):
        if rank == 0:
            gr.remove_process_set(a)
        else:
            gr.add_process_set(range(size))
    use(a, rank)
    use(b, rank)
    assert gr.remove_process_set(a) and gr.remove_process_set(b)


def test_nothing_while_a_rank_has_joined(rank: int, size: int) -> None:
    if rank == 0:
        gr.join()
    else:
        with pytest.raises(gr.InvalidArgument, match=r"process set \[0\].*a rank has joined"):
            gr.add_process_set([0])
        gr.join()
    process_set = gr.add_process_set([0])
    assert gr.remove_process_set(process_set)


def test_many_sets_one_after_the_other(rank: int, size: int) -> None:
    """Channels are used again; overlapping ones that live on are not disturbed."""
    kept = gr.add_process_set(range(size))
    for i in range(120):
        a = gr.add_process_set([i % size])
        b = gr.add_process_set([(i + 1) % size, i % size]) if size > 2 else None
        for process_set in filter(None, (a, b, kept)):
            if process_set.included():
                x = np.full(5000 if i % 10 == 0 else 5, i, np.float32)
                total = gr.allreduce(x, gr.Sum, name=f"s{i % 3}", process_set=process_set)
                assert (total == i * process_set.size()).all()
        for process_set in filter(None, (b, a) if i % 2 else (a, b)):
            assert gr.remove_process_set(process_set)
    assert gr.remove_process_set(kept)


def test_sets_given_to_init(rank: int, size: int) -> None:
    gr.shutdown()
    gr.init(process_sets="dynamic")
    gr.shutdown()
    one, last = gr.ProcessSet([0]), gr.ProcessSet([size - 1])
    for bad, match in (
        ("static", "expected a list of ProcessSet, or 'dynamic'"),
        ([one, [0]], "expected ProcessSet, got"),
        ([one, last, one], "named twice"),
        ([one, gr.ProcessSet([0])], "has the ranks"),
        ([one, gr.ProcessSet([size])], "outside of the world"),
    ):
        with pytest.raises(gr.InvalidArgument, match=match):
            gr.init(process_sets=bad)
        assert not gr.is_initialized()
        assert one.process_set_id is None
    gr.init(process_sets=iter([one, last]))
    assert [one.process_set_id, last.process_set_id] == [1, 2]
    use(one, rank)
    use(last, rank)
    added = gr.add_process_set(range(size))
    use(added, rank)
