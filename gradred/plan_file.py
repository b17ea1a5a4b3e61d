"""Files of plans: written by ``save_plan``, read by ``GRADRED_PLAN`` and ``gradred plan``.

JSON: ``{"format": "gradred plan 1", "size": ranks, "domains": [...]}``. Uses the standard library
alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from gradred.errors import InvalidArgument

__all__ = ["check_domain", "describe", "of_job", "read", "read_for_job", "write"]

FORMAT = "gradred plan 1"

# Key of a domain -> the type of its value, or of the values in its list.
_KEYS: dict[str, tuple[type, bool]] = {
    "domain": (str, False),
    "process_set": (int, False),
    "planned": (bool, False),
    "labels": (str, True),  # by position in the caller's list
    "counts": (int, True),  # elements, by position
    "nbytes": (int, True),  # on the wire, by position
    "order": (int, True),  # positions as they travel
    "group_ends": (int, True),  # places in ``order``
    "batches": (int, False),
    "changes": (int, False),
    "ready_ns": (int, True),  # by position, from the end of the batch before; empty: not measured
    "predicted_ns": (list, True),  # [start, end] by group; empty: not planned
    "measured_ns": (list, True),
    "cost_nbytes": (int, True),
    "cost_ns": (int, True),
    "round_ns": (int, False),
}


def write(path: str | os.PathLike[str], size: int, domains: Sequence[dict[str, Any]]) -> None:
    """Writes a file of plans. Raises OSError."""
    ordered = [{key: domain[key] for key in _KEYS} for domain in domains]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "size": size, "domains": ordered}, file, indent=1)
        file.write("\n")


def read(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The plans of a file by domain, the first where several process sets have one of a name.

    Raises InvalidArgument with the path and what is wrong: not readable, not such a file, a plan
    that leaves entries out.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{os.fspath(path)}: not a file of plans: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidArgument(f"{os.fspath(path)}: expected a file of format '{FORMAT}'")
    domains: dict[str, dict[str, Any]] = {}
    for number, domain in enumerate(content.get("domains", [])):
        problem = check_domain(domain)
        if problem:
            raise InvalidArgument(f"{os.fspath(path)}: domain {number}: {problem}")
        domains.setdefault(domain["domain"], domain)
    return domains


_of_job: dict[str, dict[str, Any]] = {}


def read_for_job(path: str) -> str:
    """Reads the file of ``GRADRED_PLAN`` at init; "" is none. Returns a digest of its plans, for
    the ranks to compare. Raises as ``read``, with the variable in front."""
    _of_job.clear()
    try:
        _of_job.update(read(path) if path else {})
    except InvalidArgument as error:
        raise InvalidArgument(f"GRADRED_PLAN={path}: {error}") from error
    return hashlib.sha256(json.dumps(_of_job, sort_keys=True).encode()).hexdigest()[:16]


def of_job() -> dict[str, dict[str, Any]]:
    """The plans of ``GRADRED_PLAN`` by domain, as read at init. Local."""
    return _of_job


def check_domain(domain: Any) -> str:
    """What is wrong with one domain of a file, or ""."""
    if not isinstance(domain, dict):
        return "expected an object"
    for key, (kind, many) in _KEYS.items():
        value = domain.get(key)
        values = value if many else [value]
        if not isinstance(values, list) or not all(type(v) is kind for v in values):
            return f"'{key}': expected {'a list of ' if many else ''}{kind.__name__}"
    count = len(domain["labels"])
    for key in ("counts", "nbytes", "order"):
        if len(domain[key]) != count:
            return f"'{key}' has {len(domain[key])} values for {count} entries"
    if sorted(domain["order"]) != list(range(count)):
        return "'order' does not have each position once"
    ends = domain["group_ends"]
    if not ends or ends[-1] != count or any(b <= a for a, b in zip([0, *ends], ends, strict=False)):
        return f"'group_ends' {ends} do not ascend to {count}"
    for key in ("predicted_ns", "measured_ns"):
        times = domain[key]
        if times and len(times) != len(ends):
            return f"'{key}' has {len(times)} times for {len(ends)} groups"
        if any(len(pair) != 2 or any(type(t) is not int for t in pair) for pair in times):
            return f"'{key}': expected [start, end]"
    if domain["ready_ns"] and len(domain["ready_ns"]) != count:
        return f"'ready_ns' has {len(domain['ready_ns'])} times for {count} entries"
    return ""


def groups(domain: dict[str, Any]) -> list[list[int]]:
    """The positions of each group."""
    starts = [0, *domain["group_ends"][:-1]]
    ends = domain["group_ends"]
    return [domain["order"][a:b] for a, b in zip(starts, ends, strict=True)]


def describe(domain: dict[str, Any]) -> str:
    """A domain's plan as text: a line a group, times in ms from the end of the batch before."""
    state = "planned" if domain["planned"] else "not planned"
    lines = [
        f"{domain['domain']}: {len(domain['labels'])} entries, {sum(domain['nbytes'])} bytes on "
        f"the wire, {len(domain['group_ends'])} groups; {state}, {domain['changes']} changes in "
        f"{domain['batches']} batches",
        f"  {'group':>5} {'entries':>7} {'bytes':>12} {'ready':>9}  {'predicted':>19}  "
        f"{'measured':>19}",
    ]
    for number, members in enumerate(groups(domain)):
        ready = domain["ready_ns"]
        when = f"{max(ready[i] for i in members) / 1e6:9.3f}" if ready else f"{'-':>9}"
        lines.append(
            f"  {number:5} {len(members):7} {sum(domain['nbytes'][i] for i in members):12} {when}"
            f"  {_span(domain['predicted_ns'], number):>19}"
            f"  {_span(domain['measured_ns'], number):>19}"
        )
    costs = zip(domain["cost_nbytes"], domain["cost_ns"], strict=False)
    if domain["cost_ns"]:
        table = ", ".join(f"{nbytes}: {ns / 1e6:.3f}" for nbytes, ns in costs)
        lines.append(f"  ms by bytes: {table}; a round: {domain['round_ns'] / 1e6:.3f}")
    return "\n".join(lines) + "\n"


def _span(times: list[list[int]], group: int) -> str:
    return f"{times[group][0] / 1e6:.3f}..{times[group][1] / 1e6:.3f}" if times else "-"
