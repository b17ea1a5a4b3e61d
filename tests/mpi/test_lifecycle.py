"""Beginning, end, interruption and idling, inside the ranks."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

import gradred as gr
from gradred import _core

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture(autouse=True)
def engine() -> None:
    gr.init()


def test_init_after_shutdown_several_times(size: int) -> None:
    for round_ in range(4):
        gr.shutdown()
        gr.shutdown()  # does nothing
        assert not gr.is_initialized()
        for use in (gr.rank, gr.size, gr.metrics, lambda: gr.allreduce(1.0), gr.barrier):
            with pytest.raises(ValueError, match="init"):
                use()
        odd = gr.ProcessSet([0])
        gr.init(process_sets=[odd])
        assert gr.metrics().batches <= 1  # the process set's own
        assert odd.size() == 1
        assert (gr.allreduce(np.full(3, round_), gr.Sum) == size * round_).all()


def test_process_sets_end_with_the_engine() -> None:
    gr.shutdown()
    gr.init()
    old = gr.add_process_set([0])
    gr.shutdown()
    gr.init()
    assert old.process_set_id is None
    with pytest.raises(gr.InvalidArgument, match="not registered"):
        old.included()
    assert gr.add_process_set(old).size() == 1


def test_bad_arguments_of_init() -> None:
    gr.shutdown()
    for comm in ("world", 3, [0, 0], [-1], ["0"]):
        with pytest.raises(gr.InvalidArgument, match="comm="):
            gr.init(comm)
    assert not gr.is_initialized()


def test_rubbish_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    gr.shutdown()
    for variable in ("GRADRED_STALL_WARN_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"):
        for raw in ("abc", "-1", ""):
            monkeypatch.setenv(variable, raw)
            with pytest.raises(gr.InvalidArgument, match=rf"{variable}=.*from 0 to"):
                gr.init()
        monkeypatch.delenv(variable)
    assert not gr.is_initialized()


def test_files_of_settings_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    gr.shutdown()
    monkeypatch.setenv("GRADRED_PLAN", "/no/such/plan")
    with pytest.raises(gr.InvalidArgument, match=r"GRADRED_PLAN=/no/such/plan: .*No such file"):
        gr.init()


def test_rubbish_settings_of_one_rank(job, monkeypatch: pytest.MonkeyPatch) -> None:
    gr.shutdown()
    if job.rank == job.size - 1:
        monkeypatch.setenv("GRADRED_GROUP_BYTES", "lots")
    with pytest.raises(gr.InvalidArgument, match=rf"GROUP_BYTES='lots'.*rank {job.size - 1}"):
        gr.init()
    assert not gr.is_initialized()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GRADRED_GROUP_BYTES", "1024"),
        ("GRADRED_WIRE", "float16"),
        ("GRADRED_INTRA", "flat"),
        ("GRADRED_VIRTUAL_NODES", "2"),
        ("GRADRED_CHUNK_BYTES", "65536"),
        ("GRADRED_GROUPS", "layer"),
        ("HOROVOD_FUSION_THRESHOLD", "4096"),
    ],
)
def test_settings_that_differ(job, monkeypatch, variable: str, value: str) -> None:
    if job.size == 1:
        return
    gr.shutdown()
    if job.rank == 1:
        monkeypatch.setenv(variable, value)
    with pytest.raises(gr.Mismatch) as caught:
        gr.init()
    text = str(caught.value)
    assert len(set(job.exchange(text))) == 1
    assert variable in text and value in text and "rank 1" in text
    assert not gr.is_initialized()


def test_the_wire_setting_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    gr.shutdown()
    monkeypatch.setenv("GRADRED_WIRE", "bfloat16")
    gr.init()
    try:
        x = np.array([1 + 2.0**-10], np.float32)  # not a bfloat16
        assert gr.allreduce(x, gr.Max) == 1
        assert gr.allreduce(x, gr.Max, wire="none") == x
        assert gr.allreduce(np.array([257]), gr.Max) == 257
    finally:
        gr.shutdown()


def test_null_setting_talks_to_nobody(job, monkeypatch: pytest.MonkeyPatch) -> None:
    gr.shutdown()
    monkeypatch.setenv("GRADRED_NULL", "1")
    gr.init()
    try:
        mine = np.arange(3.0) + job.rank
        assert (gr.allreduce(mine, gr.Sum) == mine).all()
        for root in range(job.size):
            assert gr.broadcast_object({"rank": job.rank}, root) == {"rank": job.rank}
        assert gr.allgather_object(job.rank) == [job.rank]
        with pytest.raises(gr.InvalidArgument, match="root_rank"):
            gr.broadcast_object(1, job.size)
    finally:
        gr.shutdown()


def test_an_interrupt_ends_a_wait_and_the_others_hear_of_it(job) -> None:
    if job.size == 1:
        return

    def ring(*_) -> None:
        raise KeyboardInterrupt

    if job.rank == 0:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                gr.allreduce(np.ones(3), name="interrupted")
        finally:
            signal.signal(signal.SIGALRM, before)
        job.barrier()
    else:
        job.barrier()
        with pytest.raises(gr.Abandoned, match=r"rank 0.*KeyboardInterrupt while waiting"):
            gr.allreduce(np.ones(3), name="interrupted")
    for name in ("interrupted", "another"):
        assert (gr.allreduce(np.ones(3), gr.Sum, name=name) == job.size).all()


SET = gr.ProcessSet([0])


def add_a_process_set() -> int | None:
    return gr.add_process_set(SET).process_set_id


def remove_a_process_set() -> bool:
    return gr.remove_process_set(SET)


@pytest.mark.parametrize("wait", [gr.join, gr.shutdown, add_a_process_set, remove_a_process_set])
def test_a_wait_after_an_interrupt_is_the_same_wait(job, wait: Callable[[], object]) -> None:
    if job.size == 1:
        return

    def ring(*_) -> None:
        raise KeyboardInterrupt

    for round_ in range(4):
        gr.init()
        if wait is remove_a_process_set:
            add_a_process_set()
        elif wait is add_a_process_set:
            remove_a_process_set()
        if job.rank == 0:
            before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                with pytest.raises(KeyboardInterrupt):
                    wait()
            finally:
                signal.signal(signal.SIGALRM, before)
        job.barrier()
        end = wait() if job.rank != 0 else None
        if round_ % 2 == 1:  # the first wait has ended before the second begins
            job.barrier()
        ends = job.exchange(end if job.rank != 0 else wait(), "the end of the wait")
        assert len(set(ends)) == 1
        assert gr.is_initialized() == (wait is not gr.shutdown)
    gr.init()
    assert (gr.allreduce(np.ones(3), gr.Sum) == job.size).all()


def entry(count: int) -> dict:
    return {
        "label": "late",
        "op": "allreduce",
        "reduce_op": "sum",
        "dtype": "float32",
        "wire": "float32",
        "shape": [count],
        "prescale": 1.0,
        "postscale": 1.0,
        "root": 0,
    }


def test_handles(job) -> None:
    def start() -> _core.Handle:
        return _core.start(_core.Spec("late", 0, [entry(4)], []), [np.ones(4, np.float32)])

    if job.rank == 0 and job.size > 1:
        handle = start()
        assert not handle.done()
        with pytest.raises(gr.Timeout, match="'late' is not finished"):
            handle.wait(0.05)
        job.barrier()
    else:
        job.barrier()
        handle = start()
    [(result, present, splits)] = handle.wait(20.0)
    assert handle.done()
    assert (result == job.size).all()
    assert present == job.size
    assert splits == []
    [(again, _, _)] = handle.wait()
    assert (again == job.size).all()


def test_a_dropped_handle_keeps_its_memory_until_done(job) -> None:
    for _ in range(5):
        if job.rank == 0:
            _core.start(
                _core.Spec("dropped", 0, [entry(1 << 16)], []), [np.ones(1 << 16, np.float32)]
            )
            job.barrier()
        else:
            job.barrier()
            [(result, _, _)] = _core.run(
                _core.Spec("dropped", 0, [entry(1 << 16)], []), [np.ones(1 << 16, np.float32)]
            )
            assert (result == job.size).all()
    gr.barrier()


def test_absent_members(job) -> None:
    mine = None if job.rank == 0 else np.full(4, 2.0, np.float32)
    before = gr.metrics().partly_absent
    [(result, present, _)] = _core.run(_core.Spec("absent", 0, [entry(4)], []), [mine])
    assert (result == 2 * (job.size - 1)).all()
    assert present == job.size - 1
    assert gr.metrics().partly_absent == before + (job.size > 1)


def test_wrong_inputs_of_a_batch() -> None:
    good = np.ones(4, np.float32)
    for inputs, text in (
        ([], "expected 1 inputs, got 0"),
        ([np.ones(4)], "expected 16 bytes, got 32"),
        ([np.ones(8, np.float32)[::2]], "C-contiguous"),
        (["good"], "NumPy array"),
    ):
        with pytest.raises(gr.InvalidArgument, match=text):
            _core.run(_core.Spec("wrong", 0, [entry(4)], []), inputs)
    for key, value in (("op", "scan"), ("dtype", "float128"), ("reduce_op", "xor")):
        with pytest.raises(gr.InvalidArgument, match=f"'{value}': expected one of"):
            _core.run(_core.Spec("wrong", 0, [{**entry(4), key: value}], []), [good])


def test_a_forked_child_has_no_engine(job) -> None:
    uses = [gr.rank, gr.init, lambda: gr.allreduce(1.0)]
    late = job.rank == job.size - 1
    if not late:  # a call in flight, which goes on in the parent
        handle = gr.allreduce_async(np.ones(3), gr.Sum, "forked")
        uses += [handle.wait, lambda: handle.wait(5.0)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert not gr.is_initialized()
            for use in uses:
                with pytest.raises(gr.NotInitialized, match="forked"):
                    use()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job.barrier()
    if late:
        handle = gr.allreduce_async(np.ones(3), gr.Sum, "forked")
    assert (handle.wait() == job.size).all()
    assert gr.allreduce(1.0) == 1.0


def test_log_lines_reach_python(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gradred")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        _core.log(level, f"line {level}")
    end = time.monotonic() + 10
    while len(caplog.records) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (level, f"line {level}") for level in (10, 20, 30, 40)
    ]


def test_idle_uses_no_cpu(job) -> None:
    """P2: Horovod takes 22 % of a core."""
    gr.barrier()
    job.barrier()
    start, cpu = time.monotonic(), time.process_time()
    time.sleep(1.0)
    used = (time.process_time() - cpu) / (time.monotonic() - start)
    job.barrier()
    assert used < 0.05


def test_plan_prints_what_was_declared() -> None:
    with pytest.raises(gr.InvalidArgument, match="nothing"):
        gr.plan("nothing.1")
    for name in ("declared.1", "declared.2"):
        _core.register_spec(name, 0, [{**entry(4), "label": f"{name}/kernel"}], [1])
    assert "kernel" in gr.plan("declared.1")
    assert "declared.2" not in gr.plan("declared.1")
    assert "declared.1" in gr.plan()
    assert "declared.2" in gr.plan()


def test_plan_of_what_is_not_known_yet() -> None:
    def register(name: str, **entries: dict) -> None:
        listed = [{**entry(4), "label": label, **more} for label, more in entries.items()]
        _core.register_spec(name, 0, listed, [1, len(listed)])

    register("unknown", rows={"shape": [-1, 4]}, kernel={}, bias={"shape": [2]})
    assert gr.plan("unknown").splitlines() == [
        "unknown: 3 entries, ? bytes, 2 groups",
        "  group 0: 1 entries, ? bytes on the wire: rows (float32)",
        "  group 1: 2 entries, 24 bytes on the wire: kernel (float32) bias (float32)",
    ]
    average = {"reduce_op": "average"}
    register(
        "kinds",
        rows={"op": "allgather", "shape": [-1, 2]},
        half={"wire": "float16"},
        long={"dtype": "int64", "wire": "int64", **average},
        short={"dtype": "int8", "wire": "int8", **average},
    )
    assert gr.plan("kinds").splitlines()[2] == (
        "  group 1: 3 entries, 104 bytes on the wire: half (float16) long (int64) short (int64)"
    )
    register("wrong", a={"dtype": "bool", "wire": "bool", **average}, b={})  # its Open says so
    assert "20 bytes" in gr.plan("wrong")
    assert "? bytes" in gr.plan()


def test_plan_prints_each_domain_once() -> None:
    def register(name: str) -> None:
        _core.register_spec(name, 0, [entry(4)], [])

    for number in (1, 2):  # two traces
        register(f"traced#{number}")
        register("traced")
    register("alone#1")
    register("a name with #")
    heads = [line.split(": ")[0] for line in gr.plan().splitlines() if line[0] != " "]
    assert len(set(heads)) == len(heads)
    assert [h for h in heads if h in ("traced", "traced#1", "traced#2")] == ["traced"]
    assert {"alone#1", "a name with #"} <= set(heads)


NATIVE = """
import numpy as np
import gradred as gr
for _ in range(2):
    gr.init()
    everybody = np.arange(gr.size())
    for count in (1, 1000, 3_000_000):
        for dtype in (np.float32, np.float64, np.int32, np.uint8, np.float16):
            x = np.full(count, gr.rank(), dtype)
            for op, value in ((gr.Sum, everybody.sum()), (gr.Max, gr.size() - 1), (gr.Min, 0)):
                name = f"{dtype.__name__} {count} {op}"
                assert (gr.allreduce(x, op, name=name) == value).all(), name
    pair = gr.add_process_set([0, 3])
    if gr.rank() in (0, 3):
        assert gr.allreduce(np.ones(9), gr.Sum, process_set=pair).tolist() == [2] * 9
    assert gr.metrics().network_bytes >= 0
    gr.shutdown()
"""


def test_native_reductions_between_nodes(run_ranks) -> None:
    """Where MPI lacks a dtype, and in other process sets, other algorithms serve."""
    env = {
        "GRADRED_VIRTUAL_NODES": "2",
        "GRADRED_REPRODUCIBLE": "0",
        "GRADRED_ALGORITHMS": "allreduce:0=native",
    }
    result = run_ranks(4, NATIVE, launcher="gradred", env=env)
    assert result.returncode == 0, result.text
