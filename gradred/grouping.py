"""Which entries of a domain travel together: cuts by bytes, by layer, into a number, by lists.

``auto`` begins with cuts by bytes; the native core changes them when it has measured.

A domain lists its entries in the order in which they are expected to be ready; a group is a run of
neighbours in that order, and starts when its last entry is ready. Entries of any dtype may share a
group. All functions are local and pure: ranks that call them alike get alike plans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradred.errors import InvalidArgument

__all__ = [
    "Entry",
    "Plan",
    "by_bytes",
    "by_layer",
    "by_lists",
    "into",
    "keys_of",
    "make_plan",
    "parse",
]

# None: the setting GRADRED_GROUPS; "auto"; "bytes": at the setting GRADRED_GROUP_BYTES; a number of
# groups; "layer"; "8MiB"; or lists.
Groups = int | str | Sequence[Sequence[Any]] | None

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6}


@dataclass(frozen=True)
class Entry:
    """One member of a domain. ``key`` tells entries apart: labels need not be unique."""

    key: Hashable
    label: str
    nbytes: int

    @property
    def layer(self) -> str:
        """The label up to its last part: "dense_1" of "dense_1/kernel"."""
        return self.label.rpartition("/")[0] or self.label


@dataclass(frozen=True)
class Plan:
    """``order[i]``: the caller's index of the domain's entry i. ``ends``: where groups end."""

    order: tuple[int, ...]
    ends: tuple[int, ...]


def parse(text: str) -> int | str:
    """A value of ``groups`` from a command line: "4" is a number of groups, "8MiB" a size.

    Raises InvalidArgument for anything but a number, a size, "auto", "bytes" or "layer".
    """
    if text.isascii() and text.isdigit():
        return int(text)
    if text not in ("auto", "bytes", "layer"):
        _nbytes(text)
    return text


def make_plan(
    entries: Sequence[Entry],
    ready_order: Sequence[int],
    groups: Groups,
    group_nbytes: int,
    key: Callable[[Any], Hashable] = id,
) -> Plan:
    """The plan of a domain.

    entries: in the caller's order. ready_order: their indices, first ready first. groups: what the
    user asked for. group_nbytes: where to cut by bytes if the user asked for nothing. key: gives an
    entry's key for what the user has put into lists.

    Raises InvalidArgument for ``groups`` that mean nothing.
    """
    order = list(ready_order)
    ready = [entries[i] for i in order]
    if groups in (None, 0, "auto", "bytes"):
        ends = by_bytes(ready, group_nbytes)
    elif isinstance(groups, bool):
        raise InvalidArgument(f"groups={groups!r}: expected a number, a size, a word or lists")
    elif isinstance(groups, int):
        ends = into(len(ready), groups)
    elif groups == "layer":
        order, ends = by_layer(entries, order)
    elif isinstance(groups, str):
        ends = by_bytes(ready, _nbytes(groups))
    else:
        order, ends = by_lists(entries, order, keys_of(groups, key))
    return Plan(tuple(order), tuple(ends))


def by_bytes(entries: Sequence[Entry], limit: int) -> list[int]:
    """Ends of groups that are as long as they can be without passing ``limit`` bytes.

    An entry that is larger than that is a group of its own.
    """
    if limit < 1:
        raise InvalidArgument(f"groups of {limit} bytes: expected at least 1")
    ends: list[int] = []
    held = 0
    for i, entry in enumerate(entries):
        if held > 0 and held + entry.nbytes > limit:
            ends.append(i)
            held = 0
        held += entry.nbytes
    return [*ends, len(entries)] if entries else []


def into(count: int, groups: int) -> list[int]:
    """Ends of ``groups`` consecutive groups of nearly equal numbers of entries, long ones first.

    More groups than entries: each entry is one.
    """
    if groups < 1:
        raise InvalidArgument(f"groups={groups}: expected at least 1 (0 and None: the setting)")
    groups = min(groups, count)
    ends: list[int] = []
    for g in range(groups):
        ends.append((ends[-1] if ends else 0) + count // groups + (g < count % groups))
    return ends


def by_layer(entries: Sequence[Entry], ready_order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Order and ends of one group a layer (see Entry.layer)."""
    return _gather(ready_order, {i: entries[i].layer for i in ready_order})


def by_lists(
    entries: Sequence[Entry], ready_order: Sequence[int], lists: Sequence[Sequence[Hashable]]
) -> tuple[list[int], list[int]]:
    """Order and ends of groups given as lists of entries' keys; other entries stay single.

    Keys that are no entry's are passed over: a model may train a part of the listed variables.
    Raises InvalidArgument for a key that is in two groups.
    """
    group_of: dict[Hashable, int] = {}
    for number, keys in enumerate(lists):
        for key in keys:
            if group_of.setdefault(key, number) != number:
                labels = [entry.label for entry in entries if entry.key == key]
                raise InvalidArgument(
                    f"groups: {labels[0] if labels else repr(key)} is in the groups "
                    f"{group_of[key]} and {number}: expected each variable once"
                )
    names: dict[int, Hashable] = {
        i: group_of.get(entries[i].key, ("single", i)) for i in ready_order
    }
    return _gather(ready_order, names)


def keys_of(groups: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Hashable]]:
    """Lists of variables as lists of their keys. Raises InvalidArgument for what are no lists."""
    lists: list[list[Hashable]] = []
    for group in groups:
        if not isinstance(group, Sequence) or isinstance(group, str):
            raise InvalidArgument(
                f"groups: expected lists of variables, got {type(group).__name__} in the list"
            )
        lists.append([key(variable) for variable in group])
    return lists


def describe(entries: Sequence[Entry], plan: Plan) -> str:
    """The plan as text, a line a group, in the order of the domain."""
    lines, begin = [], 0
    for number, end in enumerate(plan.ends):
        members = [entries[i] for i in plan.order[begin:end]]
        nbytes = sum(entry.nbytes for entry in members)
        labels = ", ".join(entry.label for entry in members)
        lines.append(f"group {number}: {len(members)} entries, {nbytes} bytes: {labels}")
        begin = end
    return "\n".join(lines)


def _gather(
    ready_order: Sequence[int], group_of: dict[int, Hashable]
) -> tuple[list[int], list[int]]:
    """Brings entries of one group together, at the place of the one that is ready last."""
    members: dict[Hashable, list[int]] = {}
    last: dict[Hashable, int] = {}
    for place, i in enumerate(ready_order):
        members.setdefault(group_of[i], []).append(i)
        last[group_of[i]] = place
    order: list[int] = []
    ends: list[int] = []
    for group in sorted(members, key=last.__getitem__):
        order += members[group]
        ends.append(len(order))
    return order, ends


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise InvalidArgument(
            f"groups={text!r}: expected 'auto', 'bytes', 'layer', a number of groups, or a size "
            "such as '16MiB'"
        )
    return int(match[1]) * _UNITS[match[2]]
