"""Settings: one table, one environment variable ``GRADRED_<NAME>`` a row.

Values are parsed strictly. Settings of scope "job" must be equal on all ranks, which ``init()``
checks; those of scope "rank" may differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradred.errors import InvalidArgument, Mismatch

__all__ = [
    "Setting",
    "Settings",
    "check_equal",
    "job_text",
    "load",
    "load_valid",
    "table",
    "unknown_variables",
]

PREFIX = "GRADRED_"
Scope = Literal["job", "rank"]

# Written by the launcher and the test harness for the processes that they start; no settings.
LAUNCHER_PREFIXES = ("GRADRED_JOB", "GRADRED_LOCAL_", "GRADRED_LAUNCH", "GRADRED_TEST_")

_ALGORITHMS = r"(allreduce|allgather):[0-9]{1,15}=[a-z_]+(,[0-9]{1,15}=[a-z_]+)*"


@dataclass(frozen=True)
class Setting:
    """One row of the table. ``low`` and ``high`` are inclusive; ``choices`` are for words.

    ``pattern``: what a text must match, said as ``words``.
    """

    kind: Literal["choice", "int", "float", "bool", "text"]
    scope: Scope
    text: str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    pattern: str = ""
    words: str = "a text that is not empty"

    @property
    def accepted(self) -> str:
        """The accepted values, for messages and ``gradred info``."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "bool":
            return "0 or 1"
        if self.kind == "text":
            return self.words
        what = "an integer" if self.kind == "int" else "a number"
        if math.isinf(self.high):
            return f"{what} of at least {_plain(self.low)}"
        return f"{what} from {_plain(self.low)} to {_plain(self.high)}"

    def parse(self, variable: str, raw: str) -> Any:
        """The value that ``raw`` stands for; InvalidArgument when it stands for none."""
        value: Any = None
        if self.kind == "choice":
            value = raw if raw in self.choices else None
        elif self.kind == "bool":
            value = {"0": False, "1": True}.get(raw)
        elif self.kind == "text":
            good = re.fullmatch(self.pattern, raw) if self.pattern else raw.strip()
            value = raw if good else None
        else:
            # int() and float() also take "1_000", " 7 " and non-ASCII digits: rubbish in a setting.
            try:
                if raw.isascii() and "_" not in raw and raw == raw.strip():
                    value = int(raw) if self.kind == "int" else float(raw)
            except ValueError:
                value = None
            if value is not None and not (math.isfinite(value) and self.low <= value <= self.high):
                value = None
        if value is None:
            raise InvalidArgument(f"{variable}={raw!r}: expected {self.accepted} ({self.text})")
        return value


def _plain(number: float) -> str:
    """1e8 as "100000000", 0.1 as "0.1"."""
    return str(int(number)) if number == int(number) else repr(number)


def _row(default: Any, kind: Any, scope: Scope, text: str, **limits: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(kind, scope, text, **limits)})


@dataclass(frozen=True)
class Settings:
    """The settings of this rank. Times are in seconds, sizes in bytes."""

    transport: str = _row(
        "auto", "choice", "job", "how ranks talk", choices=("auto", "mpi", "local", "self")
    )
    intra: str = _row(
        "shm",
        "choice",
        "job",
        "inside a node: shared memory, or messages",
        choices=("shm", "flat"),
    )
    virtual_nodes: int = _row(
        1, "int", "job", "cut each machine into this many nodes", low=1, high=4096
    )
    mpi_library: str = _row("", "text", "rank", "path of the MPI library; unset: the one that fits")
    mpi_threads: str = _row(
        "multiple",
        "choice",
        "job",
        "thread level that is asked of MPI; serialized: one MPI call at a time",
        choices=("multiple", "serialized"),
    )
    thread_affinity: str = _row(
        "",
        "text",
        "job",
        "core of the engine's threads, by local rank; unset: where the rank may run",
        pattern=r"[0-9]{1,5}(,[0-9]{1,5})*",
        words="numbers of cores such as 3,7",
    )
    chunk_bytes: int = _row(
        1 << 20, "int", "job", "size of the pieces a group travels in", low=4096, high=1 << 40
    )
    slot_bytes: int = _row(
        1 << 20,
        "int",
        "job",
        "size up to which a group has memory of its own, packed as its tensors come; 0: none",
        low=0,
        high=1 << 40,
    )
    algorithms: str = _row(
        "",
        "text",
        "job",
        "algorithms between nodes by size, in place of those of `gradred info`",
        pattern=rf"{_ALGORITHMS}(;{_ALGORITHMS})?",
        words="rows such as allreduce:0=recursive_doubling,32768=pairwise",
    )
    reproducible: bool = _row(
        True, "bool", "job", "results do not depend on sizes and groups; 0 allows ring and native"
    )
    group_bytes: int = _row(
        64 << 20, "int", "job", "size at which a group of gradients is cut", low=1, high=1 << 40
    )
    groups: str = _row(
        "auto",
        "text",
        "job",
        "groups of gradients where a call names none",
        pattern=r"auto|bytes|layer|[1-9][0-9]*|0*[1-9][0-9]* ?([kM]?B|[KMG]iB)",
        words="auto, bytes, layer, a number of groups, or a size such as 16MiB",
    )
    plan: str = _row("", "text", "job", "file of plans to use instead of measuring; unset: measure")
    plan_batches: int = _row(
        8, "int", "job", "batches that are measured for a plan", low=1, high=10000
    )
    spare_core: str = _row(
        "auto",
        "choice",
        "job",
        "plan for ranks that leave a core idle while they compute; auto: measured",
        choices=("auto", "yes", "no"),
    )
    wire: str = _row(
        "none",
        "choice",
        "job",
        "dtype on the wire of float32 and float64 tensors where a call names none",
        choices=("none", "float16", "bfloat16"),
    )
    null: bool = _row(
        False, "bool", "job", "return the inputs, talk to nobody: to measure communication"
    )
    stall_warn_seconds: float = _row(
        60.0,
        "float",
        "rank",
        "warn of ranks that lack what others wait for; 0: never",
        low=0,
        high=1e8,
    )
    stall_fail_seconds: float = _row(
        0.0,
        "float",
        "rank",
        "end gradred on all ranks when others have not brought something by then; 0: never",
        low=0,
        high=1e8,
    )
    transport_timeout_seconds: float = _row(
        30.0,
        "float",
        "rank",
        "end gradred on all ranks when a group is not done and nothing has moved for so long",
        low=0.1,
        high=1e8,
    )
    init_timeout_seconds: float = _row(
        300.0,
        "float",
        "rank",
        "longest wait for the other ranks in init(); MPI has no limit under a plain mpirun",
        low=0.1,
        high=1e8,
    )
    diff_checks: str = _row(
        "all",
        "text",
        "job",
        "operations of a context of gradred.diff that are compared over its ranks, from the first",
        pattern=r"all|0|[1-9][0-9]{0,8}",
        words="all, or a number of operations",
    )
    hypre_library: str = _row(
        "", "text", "job", "path of the library of HYPRE; unset: where the system has it"
    )
    timeline: str = _row(
        "", "text", "job", "record a timeline, each rank to PATH.rankN.json; unset: none"
    )
    timeline_mark_cycles: bool = _row(
        False, "bool", "job", "mark the rounds of negotiation in that timeline"
    )
    log_level: str = _row(
        "warning",
        "choice",
        "rank",
        'level of the logger "gradred"',
        choices=("debug", "info", "warning", "error"),
    )


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def table() -> dict[str, tuple[Setting, Any]]:
    """All rows: environment variable -> (row, default)."""
    return {
        variable_of(f.name): (f.metadata["setting"], f.default)
        for f in dataclasses.fields(Settings)
    }


def load(environ: Mapping[str, str]) -> Settings:
    """The settings of an environment. Raises InvalidArgument with variable, value and range."""
    values, problem = load_valid(environ)
    if problem:
        raise InvalidArgument(problem)
    return values


def load_valid(environ: Mapping[str, str]) -> tuple[Settings, str]:
    """The settings of an environment, defaults for what is rubbish; and what is rubbish, or ""."""
    values, problems = {}, []
    for f in dataclasses.fields(Settings):
        variable = variable_of(f.name)
        if variable in environ:
            try:
                values[f.name] = f.metadata["setting"].parse(variable, environ[variable])
            except InvalidArgument as error:
                problems.append(str(error))
    return Settings(**values), "; ".join(problems)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for each GRADRED_* variable that means nothing, with the nearest one that does."""
    known = list(table())
    lines = []
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known:
            continue
        if variable.startswith(LAUNCHER_PREFIXES):
            continue
        name = variable.removeprefix(PREFIX)  # the prefix alone would make all of them alike
        nearest = difflib.get_close_matches(name, [k.removeprefix(PREFIX) for k in known], n=1)
        hint = f"; did you mean {PREFIX}{nearest[0]}?" if nearest else ""
        lines.append(f"environment variable {variable} is no setting of gradred{hint}")
    return lines


def job_text(settings: Settings, extra: Mapping[str, Any]) -> str:
    """What must agree over ranks, as text: the settings of scope "job", and ``extra``."""
    values = {
        variable_of(f.name): getattr(settings, f.name)
        for f in dataclasses.fields(Settings)
        if f.metadata["setting"].scope == "job"
    }
    return json.dumps({**extra, **values})


def check_equal(texts: Sequence[str], aliases: Mapping[str, Sequence[str]] | None = None) -> None:
    """Raises, alike on all ranks, unless all settings are equal where they must be.

    texts: of ``job_text``, in rank order. aliases: by variable, others that may have set it.

    Raises:
        Mismatch: names settings, values and ranks.
    """
    ranks = [json.loads(text) for text in texts]
    lines = []
    for name in dict.fromkeys(name for values in ranks for name in values):
        held_by = holders([json.dumps(values.get(name)) for values in ranks])
        if len(held_by) > 1:
            parts = [f"{value} on {name_ranks(held)}" for value, held in held_by.items()]
            also = f" (or {', '.join(aliases[name])})" if aliases and name in aliases else ""
            lines.append(f"{name}{also} is " + ", ".join(parts))
    if lines:
        text = "; ".join(lines)
        raise Mismatch(f"init: settings differ between ranks: {text}; set them alike")


def holders(values: Sequence[str]) -> dict[str, list[int]]:
    """Which ranks have a value: value -> ranks, in order of the lowest rank."""
    held_by: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        held_by.setdefault(value, []).append(rank)
    return held_by


def name_ranks(ranks: Sequence[int], shown: int = 8) -> str:
    """ "rank 3", "ranks 0, 1, 2 and 5 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    text = ", ".join(str(rank) for rank in ranks[:shown])
    more = len(ranks) - shown
    return f"ranks {text}" + (f" and {more} more" if more > 0 else "")
