"""What ranks may disagree on, as a table: a right call, and the one that one rank makes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Tensor = tuple[tuple[int, ...], str]  # shape, dtype
# Operation, its tensors (one, but for the grouped ones), options; reductions by their names.
Call = tuple[str, list[Tensor], dict[str, Any]]

_F32 = "float32"
_REDUCTIONS = ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter")
_GATHERS = ("allgather", "grouped_allgather", "alltoall")


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    right: Call
    odd: Call
    words: tuple[str, ...]  # that the text has, beside operation and ranks

    def __str__(self) -> str:
        return f"{self.right[0]}: {self.kind}"


def _cases() -> list[Case]:
    cases: list[Case] = []

    def add(kind: str, right: Call, odd: Call, *words: str) -> None:
        cases.append(Case(len(cases), kind, right, odd, words))

    def tensors(operation: str, first: Tensor) -> list[Tensor]:
        more: list[Tensor] = [((12,), "int32"), ((12, 1), "float16")]
        return [first, *more] if operation.startswith("grouped_") else [first]

    for operation in (*_REDUCTIONS, *_GATHERS, "broadcast"):
        right = (operation, tensors(operation, ((12, 2), _F32)), {})
        free = "*" if operation in _GATHERS else "12"

        def other(shape: tuple[int, ...], dtype: str = _F32, operation: str = operation) -> Call:
            return operation, tensors(operation, (shape, dtype)), {}

        add("trailing dimension", right, other((12, 3)), f"[{free}, 2]", f"[{free}, 3]")
        add("number of dimensions", right, other((12,)), f"[{free}, 2]", f"[{free}]")
        add("dtype", right, other((12, 2), "float64"), "float32", "float64")
        if operation not in _GATHERS:
            add("first dimension", right, other((24, 2)), "[12, 2]", "[24, 2]")
        if operation.startswith("grouped_"):
            longer = (operation, [*right[1], ((12,), _F32)], {})
            add("number of tensors", right, longer, "3 entries", "4 entries")
            swapped = (operation, right[1][::-1], {})
            add("order of tensors", right, swapped, "float16")
        if operation in _REDUCTIONS:
            for kind, option, words in (
                ("reduction", {"op": "Max"}, ("average", "max")),
                ("sum and average", {"op": "Sum"}, ("average", "sum")),
                ("prescale", {"prescale_factor": 0.1}, ("prescale 0.1",)),
                ("postscale", {"postscale_factor": 3.5}, ("postscale 3.5",)),
                ("wire", {"wire": "float16"}, ("wire float16",)),
            ):
                add(kind, right, (operation, right[1], option), *words)
        if operation == "broadcast":
            add("root", right, (operation, right[1], {"root_rank": 1}), "root 0", "root 1")
        another = "allgather" if operation == "allreduce" else "allreduce"
        add("another collective", right, (another, right[1][:1], {}), another)
    x: list[Tensor] = [((12, 2), _F32)]
    add("another collective", ("barrier", [], {}), ("allreduce", x, {}), "barrier", "allreduce")
    return cases


CASES = _cases()


def is_told_alike(text: str, case: Case, name: str, odd: int, size: int) -> None:
    """Asserts that a Mismatch names set, tensor, both sides' ranks and what each brought.

    A rank that has not come to the call when the others differ is on neither side.
    """
    assert name in text and "process set 0" in text, text
    sides = [_ranks(side) for side in re.findall(r"\brank ([\d, -]+): ", text)]
    assert len(sides) == 2 and [odd] in sides, text
    sides.remove([odd])
    assert sides[0] and set(sides[0]) <= set(range(size)) - {odd}, text
    for word in (case.right[0].removeprefix("grouped_"), *case.words):
        assert word in text, f"{word!r} is not in: {text}"


def _ranks(runs: str) -> list[int]:
    """Of "0, 2-3": 0, 2, 3."""
    bounds = [run.split("-") for run in runs.split(", ")]
    return [rank for run in bounds for rank in range(int(run[0]), int(run[-1]) + 1)]
