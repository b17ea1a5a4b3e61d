"""Horovod's environment variables: one table of what each means here.

A variable that has a meaning stands for settings of ``gradred.config``, for which a ``GRADRED_*``
variable goes first. One that has none is reported once, with the reason.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradred.config import Setting, variable_of
from gradred.errors import InvalidArgument

__all__ = ["Translation", "Variable", "sources", "table", "translate"]

PREFIX = "HOROVOD_"


@dataclass(frozen=True)
class Variable:
    """One row of the table.

    ``text``: what it does here, or why it does nothing. ``setting``: what it accepts; None: its
    value is not looked at. ``gives``: settings, as texts, by the value. ``silent``: nothing is lost
    by ignoring the value, so nothing is reported.
    """

    text: str
    setting: Setting | None = None
    gives: Callable[[Any], Mapping[str, str]] | None = None
    silent: Callable[[str], bool] = field(default=lambda raw: False)

    @property
    def has_meaning(self) -> bool:
        return self.gives is not None


@dataclass(frozen=True)
class Translation:
    """environ: with GRADRED_* for what HOROVOD_* says. problem: what is rubbish, or "".

    notes: a line for each variable that means nothing here.
    """

    environ: dict[str, str]
    problem: str
    notes: list[str]


def _number(kind: Any, text: str, high: float) -> Setting:
    return Setting(kind, "job", text, low=0, high=high)


def _on(name: str, value: str, text: str) -> Variable:
    """A switch: on above 0, as in Horovod; off says nothing."""
    return Variable(
        text, _number("int", text, 1 << 31), lambda number: {name: value} if number > 0 else {}
    )


def _off(raw: str) -> bool:
    return raw.strip() in ("", "0")


def _nothing(why: str) -> Variable:
    return Variable(why, silent=_off)


def _same(why: str) -> Variable:
    return Variable(why, silent=lambda raw: True)


_SECONDS = 1e8
_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "fatal": "error",
}
_ANY_CASE = "(?i:" + "|".join(_LEVELS) + ")"
_NCCL = "tensors travel through host memory, without NCCL"
_AUTOTUNE = "groups are planned from measurements, without a search"
_GLOO = "there is no Gloo"


def _fusion(nbytes: int) -> dict[str, str]:
    return {"group_bytes": str(max(1, nbytes)), "groups": "bytes"}


def _timeline(path: str) -> dict[str, str]:
    return {} if path.upper() == "DYNAMIC" else {"timeline": path}


# Later rows go before earlier ones.
_ROWS: dict[str, Variable] = {
    "FUSION_THRESHOLD": Variable(
        "cuts groups of gradients at so many bytes, in place of measured groups; 0: each alone",
        _number("int", "bytes of a group", 1 << 40),
        _fusion,
    ),
    "AUTOTUNE": _on("groups", "auto", "groups of gradients are measured, which is the default"),
    "STALL_CHECK_TIME_SECONDS": Variable(
        "warns of ranks that lack what others wait for; 0: never",
        _number("float", "seconds until a warning", _SECONDS),
        lambda seconds: {"stall_warn_seconds": repr(seconds)},
    ),
    "STALL_SHUTDOWN_TIME_SECONDS": Variable(
        "ends gradred on all ranks when others have not brought something by then; 0: never",
        _number("float", "seconds until the end", _SECONDS),
        lambda seconds: {"stall_fail_seconds": repr(seconds)},
    ),
    "STALL_CHECK_DISABLE": Variable(
        "above 0: neither a warning nor an end",
        _number("int", "0: on", 1 << 31),
        lambda number: {"stall_warn_seconds": "0", "stall_fail_seconds": "0"} if number > 0 else {},
    ),
    "TIMELINE": Variable(
        "records a timeline, each rank to PATH.rankN.json; DYNAMIC: when start_timeline is called",
        Setting("text", "job", "path of a timeline, or DYNAMIC"),
        _timeline,
    ),
    "TIMELINE_MARK_CYCLES": _on(
        "timeline_mark_cycles", "1", "marks the rounds of negotiation in that timeline"
    ),
    "LOG_LEVEL": Variable(
        'level of the logger "gradred"; trace is debug, fatal is error',
        Setting(
            "text",
            "rank",
            "level of log lines",
            pattern=_ANY_CASE,
            words="one of " + ", ".join(_LEVELS) + ", in any case",
        ),
        lambda level: {"log_level": _LEVELS[level.lower()]},
    ),
    "MPI_THREADS_DISABLE": _on(
        "mpi_threads",
        "serialized",
        "asks MPI for MPI_THREAD_SERIALIZED; one MPI call at a time",
    ),
    "THREAD_AFFINITY": Variable(
        "core of the engine's threads, by local rank",
        Setting(
            "text",
            "job",
            "cores by local rank",
            pattern=r"[0-9]{1,5}(,[0-9]{1,5})*",
            words="numbers of cores such as 3,7",
        ),
        lambda cores: {"thread_affinity": cores},
    ),
    "DYNAMIC_PROCESS_SETS": _same("process sets can be added and removed at any time"),
    "DISABLE_GROUP_FUSION": _same("a group is never merged with another"),
    "HIERARCHICAL_ALLREDUCE": Variable(
        "reductions are by levels, in the node and between nodes; GRADRED_INTRA=flat is without",
        silent=lambda raw: raw != "0",
    ),
    "HIERARCHICAL_ALLGATHER": Variable(
        "gathers are by levels, in the node and between nodes; GRADRED_INTRA=flat is without",
        silent=lambda raw: raw != "0",
    ),
    "CPU_OPERATIONS": Variable(
        "shared memory in the node and MPI between nodes carry the tensors",
        silent=lambda raw: raw.upper() == "MPI",
    ),
    "CONTROLLER": Variable(
        "ranks agree without a controller, in shared memory and over MPI",
        silent=lambda raw: raw.upper() == "MPI",
    ),
    "CYCLE_TIME": Variable("ranks agree when something is ready; there are no cycles"),
    "CACHE_CAPACITY": Variable("every known name is agreed on by one bit, without a limit"),
    "TORUS_ALLREDUCE": _nothing("GRADRED_ALGORITHMS chooses algorithms between nodes"),
    "BATCH_D2D_MEMCOPIES": _nothing(_NCCL),
    "NUM_NCCL_STREAMS": _nothing(_NCCL),
    "ENABLE_ASYNC_COMPLETION": _nothing(_NCCL),
    "DISABLE_NVTX_RANGES": _nothing("there are no NVTX ranges; see GRADRED_TIMELINE"),
    "ENABLE_XLA_OPS": _nothing("XLA cannot run a reduction"),
    "ADASUM_MPI_CHUNK_SIZE": _nothing("there is no Adasum"),
    "CCL_CACHE": _nothing("there is no oneCCL"),
    "CCL_BGT_AFFINITY": _nothing("there is no oneCCL"),
    "GLOO_IFACE": _nothing(_GLOO),
    "GLOO_TIMEOUT_SECONDS": _nothing(_GLOO + "; see GRADRED_TRANSPORT_TIMEOUT_SECONDS"),
    "AUTOTUNE_LOG": _nothing(_AUTOTUNE + "; save_plan() writes the plan"),
    "AUTOTUNE_WARMUP_SAMPLES": _nothing(_AUTOTUNE),
    "AUTOTUNE_STEPS_PER_SAMPLE": _nothing(_AUTOTUNE + "; see GRADRED_PLAN_BATCHES"),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _nothing(_AUTOTUNE),
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _nothing(_AUTOTUNE),
    "LOG_HIDE_TIME": _nothing("handlers of Python's logging show the time, or not"),
    "ELASTIC": _nothing("elastic training is not supported: a lost rank ends the job"),
    "ELASTIC_TIMEOUT": _nothing("elastic training is not supported"),
}
# Of Horovod's launcher, build and other integrations: they say nothing to a program.
_OF_OTHERS = re.compile(
    r"(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|HOSTNAME|SECRET_KEY|START_TIMEOUT"
    r"|GLOO_RENDEZVOUS_(ADDR|PORT)|(WITH|WITHOUT|SPARK|RAY|GPU|CUDA|ROCM|NCCL|BUILD)(_.*)?"
    r"|DEBUG|SKIP_COMPILE|CMAKE|LOCAL_VERSION|ALLOW_MIXED_GPU_IMPL|RENDEZVOUS_.*)"
)


def table() -> dict[str, Variable]:
    """All rows: environment variable -> row."""
    return {PREFIX + name: row for name, row in _ROWS.items()}


def sources() -> dict[str, list[str]]:
    """By GRADRED_* variable: the HOROVOD_* variables that may stand for it."""
    found: dict[str, list[str]] = {}
    samples: dict[str, Any] = {"int": 1, "float": 1.0, "text": "info"}
    for variable, row in table().items():
        if row.gives is None or row.setting is None:
            continue
        for name in row.gives(samples[row.setting.kind]):
            found.setdefault(variable_of(name), []).append(variable)
    return found


def translate(environ: Mapping[str, str]) -> Translation:
    """What an environment's HOROVOD_* variables mean."""
    given: dict[str, str] = {}
    problems, notes = [], []
    known = table()
    for variable, row in known.items():
        raw = environ.get(variable)
        if raw is None:
            continue
        if row.gives is None or row.setting is None:
            if not row.silent(raw):
                notes.append(f"{variable}={raw} means nothing to gradred: {row.text}")
            continue
        try:
            given.update(row.gives(row.setting.parse(variable, raw)))
        except InvalidArgument as error:
            problems.append(str(error))
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and name not in _ROWS and not _OF_OTHERS.fullmatch(name):
            nearest = difflib.get_close_matches(name, _ROWS, n=1)
            hint = f"; did you mean {PREFIX}{nearest[0]}?" if nearest else ""
            notes.append(f"environment variable {variable} is not known to gradred{hint}")
    filled = {variable_of(name): value for name, value in given.items()}
    return Translation({**filled, **environ}, "; ".join(problems), notes)
