"""Jobs in which a rank fails, whatever the launcher: programs, and what must come of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

# Every rank that survives prints what it caught, how long it waited, and ends as if all were well.
_SURVIVE = """
import atexit, json, os, signal, sys, time
import numpy as np
import gradred as gr

def survive(wait):
    start = time.monotonic()
    try:
        wait()
    except gr.Error as error:
        print(json.dumps([error.kind, str(error), time.monotonic() - start]))
    else:
        print(json.dumps(["nothing", "", 0]))

gr.init()
for _ in range(3):
    gr.allreduce(np.ones(3), name="step")
gr.barrier()
"""

# Rank 2 does not catch what rank 1's end is to it, and its process ends before that of rank 1.
RAISE = (
    """
import atexit, os, time

def be_last():
    end = time.monotonic() + 10
    while raised and not os.path.exists(rank_2) and time.monotonic() < end:
        time.sleep(0.01)

raised, rank_2 = False, os.environ.get("GRADRED_JOB_DIR", "") + "/rank-2"
atexit.register(be_last)
"""
    + _SURVIVE
    + """
if gr.rank() == 1:
    raised = "GRADRED_JOB_DIR" in os.environ
    raise ValueError("boom in step 3")
if gr.rank() == 0:
    survive(lambda: gr.allreduce(np.ones(3), name="step"))
gr.allreduce(np.ones(3), name="step") if gr.rank() == 2 else None
"""
)

EXIT = (
    _SURVIVE
    + """
if gr.rank() == 1:
    sys.exit(3)
survive(lambda: gr.allreduce(np.ones(3), name="step"))
"""
)

KILL = (
    _SURVIVE
    + """
atexit.register(lambda: print("handlers run"))
if gr.rank() == 1:
    print("at", time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
survive(lambda: gr.allreduce(np.ones(3), name="step"))
print("at", time.monotonic())
survive(lambda: gr.allreduce(np.ones(3), name="another"))
gr.shutdown()
survive(gr.init)
sys.stdout.write("the last line")
"""
)

ABORT = (
    _SURVIVE
    + """
from gradred import _core
if gr.rank() == 1:
    _core.abort("Internal", "rank 1 was told to give up")
survive(lambda: gr.allreduce(np.ones(3), name="step"))
sys.exit(7 * gr.rank())
"""
)

# A known and a new tensor that rank 1 does not bring, at once; then one more try.
STALL = (
    _SURVIVE
    + """
from gradred import _core
entry = dict(label="x", op="allreduce", reduce_op="sum", dtype="float64", wire="float64", shape=[3],
             prescale=1.0, postscale=1.0, root=0)
if gr.rank() != 1:
    import logging
    class Print(logging.Handler):
        def emit(self, record):
            print(json.dumps([record.levelname, record.getMessage(), time.monotonic() - start]))
    logging.getLogger("gradred").addHandler(Print())
    start = time.monotonic()
    known = _core.start(_core.Spec("step", 0, [{**entry, "label": "step"}], []), [np.ones(3)])
    new = _core.start(_core.Spec("new", 0, [{**entry, "label": "new"}], []), [np.ones(3)])
    survive(known.wait)
    survive(new.wait)
else:
    end = time.monotonic() + 20
    while _core.failure() is None and time.monotonic() < end:
        time.sleep(0.05)
    survive(lambda: gr.allreduce(np.ones(3), name="step"))
"""
)

# Rank 1 alone has something wrong; then all try again. `tries`: (variables of rank 1, arguments of
# its init) each.
INIT = """
import json, os, sys, time
import gradred as gr

def attempt(*, variables=(), arguments=None):
    mine = RANK == 1
    os.environ.update(dict(variables) if mine else {})
    start = time.monotonic()
    try:
        gr.init(**((arguments or {}) if mine else {}))
    except gr.Error as error:
        print(json.dumps([error.kind, str(error), time.monotonic() - start]))
    for name, _ in variables:
        os.environ.pop(name, None)

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("GRADRED_LOCAL_RANK")))
attempt(variables=[("GRADRED_NULL", "maybe")])
attempt(variables=[("GRADRED_ALGORITHMS", "allreduce:0=telepathy")])
attempt(variables=[("GRADRED_PLAN", "/no/such/file")])
attempt(variables=[("GRADRED_TRANSPORT", "self")])
attempt(arguments={"comm": "garbage"})
attempt(arguments={"process_sets": [3]})
attempt(arguments={"process_sets": [gr.ProcessSet([0])]})
assert not gr.is_initialized()
attempt()
assert gr.size() == 3
gr.shutdown()
"""

# Rank 1 never comes to init.
LATE = """
import json, os, sys, time
import gradred as gr
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("GRADRED_LOCAL_RANK"))) == 1:
    FAIL
start = time.monotonic()
try:
    gr.init()
except gr.Error as error:
    print(json.dumps([error.kind, str(error), time.monotonic() - start]))
try:
    gr.init()
except gr.Error as error:
    print(json.dumps([error.kind, str(error), 0]))
"""


# Long before any time limit of gradred's, and long enough for processes that wait for a core.
_SOON_S = 20.0
# For the others to come as far as where they hear of it, however long they take to start.
_GRACE = ("--grace", "20")


def caught(text: str) -> list[tuple[str, str, float]]:
    """What a rank printed: kind, message, seconds."""
    return [tuple(json.loads(line)) for line in text.splitlines() if line.startswith("[")]


def check_init(run_ranks, launcher: str) -> None:
    result = run_ranks(3, INIT, launcher=launcher, options=_GRACE)
    assert result.returncode == 0, result.text
    expected = [
        ("InvalidArgument", "GRADRED_NULL='maybe'"),
        ("InvalidArgument", "'telepathy'"),
        ("InvalidArgument", "/no/such/file"),
        ("InvalidArgument", "GRADRED_TRANSPORT=self"),
        ("InvalidArgument", "comm='garbage'"),
        ("InvalidArgument", "expected ProcessSet, got 3"),
        ("Mismatch", "process_sets of init() is [] on ranks 0, 2, [[0]] on rank 1"),
    ]
    for rank in range(3):
        lines = caught(result.out[rank])
        assert len(lines) == len(expected), result.text
        for (kind, text, seconds), (wanted, part) in zip(lines, expected, strict=True):
            assert kind == wanted, result.text
            assert part in text, result.text
            assert "rank 1" in text, result.text
            assert seconds < _SOON_S, result.text


def check_late(run_ranks, launcher: str, failure: str, *parts: str) -> None:
    """A rank that ends, or fails, where the others cannot be met."""
    result = run_ranks(3, LATE.replace("FAIL", failure), launcher=launcher, options=_GRACE)
    assert result.returncode != 0, result.text
    for rank in (0, 2):
        (_, text, seconds), (_, again, _) = caught(result.out[rank])
        assert "rank 1" in text, result.text
        assert "rank 1" in again or launcher == "local", result.text
        for part in parts:
            assert part in text, result.text
        assert seconds < _SOON_S, result.text


def check_raise(run_ranks, launcher: str) -> None:
    result = run_ranks(3, RAISE, launcher=launcher, options=_GRACE)
    assert result.returncode != 0, result.text
    assert result.codes == [0, 1, 1], result.text
    [(kind, text, seconds)] = caught(result.out[0])
    assert kind == "Abandoned", result.text
    assert "rank 1" in text, text
    assert "ValueError: boom in step 3" in text, text
    assert seconds < _SOON_S, result.text
    assert "ValueError: boom in step 3" in result.err[1]
    assert f"gradred.errors.Abandoned: {text}" in result.err[2]
    because = "the job ended because rank 1 ended by exit code 1: ValueError: boom in step 3\n"
    assert because in result.launcher_err, result.text


def check_exit(run_ranks, launcher: str) -> None:
    result = run_ranks(3, EXIT, launcher=launcher, options=_GRACE)
    assert result.returncode != 0, result.text
    assert result.codes == [0, 3, 0], result.text
    for rank in (0, 2):
        [(kind, text, seconds)] = caught(result.out[rank])
        assert kind == "Abandoned", result.text
        assert "rank 1" in text, text
        assert "the process ended" in text, text
        assert seconds < _SOON_S, result.text


def check_kill(
    run_ranks, launcher: str, program: str = KILL, options: Sequence[str] = _GRACE
) -> None:
    result = run_ranks(3, program, launcher=launcher, options=options)
    assert result.returncode != 0, result.text
    assert result.codes[1] == -9, result.text
    for rank in (0, 2):
        first, second, init = caught(result.out[rank])
        for kind, text, seconds in (first, second, init):
            assert kind == "PeerLost", result.text
            assert "rank 1" in text, text
            assert "SIGKILL" in text, text
            assert seconds < _SOON_S, result.text
        assert "refused after an engine error" in init[1]
        assert result.codes[rank] == 1, result.text
        assert "the last line" in result.out[rank]
        assert "handlers run" in result.out[rank]
    # H13: from the kill to the last rank's error, by the clock that the ranks of a machine share.
    at = [float(line[3:]) for out in result.out for line in out.splitlines() if line[:3] == "at "]
    assert len(at) == 3 and max(at) - at[1] < 5, result.text


def check_abort(run_ranks, launcher: str) -> None:
    result = run_ranks(3, ABORT, launcher=launcher, options=_GRACE)
    assert result.returncode != 0, result.text
    # The program's own exit code, except that it cannot be 0.
    assert result.codes == [1, 7, 14], result.text
    for rank in range(3):
        [(kind, text, seconds)] = caught(result.out[rank])
        assert kind == "Internal", result.text
        assert "rank 1 was told to give up" in text
        assert seconds < _SOON_S, result.text


def check_stall(run_ranks, launcher: str) -> None:
    limits = {"GRADRED_STALL_WARN_SECONDS": "3", "GRADRED_STALL_FAIL_SECONDS": "6"}
    result = run_ranks(2, STALL, launcher=launcher, options=_GRACE, env=limits)
    assert result.returncode != 0, result.text
    lines = caught(result.out[0])
    warnings = [line for line in lines if line[0] == "WARNING"]
    failures = [line for line in lines if line[0] == "Timeout"]
    for name in ("step", "new"):
        [(_, text, seconds)] = [w for w in warnings if f"'{name}'" in w[1]]
        assert "rank 1" in text, text
        assert 2.9 < seconds < failures[0][2], lines
    assert len(failures) == 2, result.text
    assert 5.9 < failures[0][2] < _SOON_S, lines
    for _, text, _ in failures:
        assert "not submitted by rank 1" in text
        assert "stall limit is 6" in text
    [(kind, text, _)] = caught(result.out[1])
    assert kind == "Timeout", result.text
    assert "rank 0 has waited" in text
