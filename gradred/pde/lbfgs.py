"""Limited-memory BFGS over the ranks of a job, with a line search for the strong Wolfe conditions.

J. Nocedal and S. J. Wright, Numerical Optimization, 2nd edition: algorithms 7.4 (two-loop
recursion), 3.5 and 3.6 (line search). The parameters, the pairs of the recursion and so the
iterates are replicated: each rank evaluates its share of the function and of its gradient, both are
summed over the ranks in one allreduce an evaluation, and all the rest is done alike on every rank.
That needs equal dot products: one kind of processor, one NumPy, one number of its threads.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradred import basics, collectives, diff
from gradred.diff.guard import as_text
from gradred.errors import Abandoned, InvalidArgument, Mismatch
from gradred.objects import allgather_object, broadcast_object
from gradred.process_sets import ProcessSet, global_process_set
from gradred.reduce_ops import ReduceOp

__all__ = ["LbfgsState", "minimize_lbfgs"]

_ARMIJO, _CURVATURE = 1e-4, 0.9  # c1 and c2 of the Wolfe conditions, as is usual for quasi-Newton
_LONGEST_STEP = 1e10
_LINE_EVALUATIONS = 25

Share = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclass
class LbfgsState:
    """Where a minimization stands: equal on all ranks, whatever their number.

    x: the parameters, float64 of shape [n]. value, gradient: of the whole function there.
    steps, changes: the newest differences of x and of the gradient. reason: why it ended.
    """

    x: np.ndarray
    value: float = math.nan
    gradient: np.ndarray = field(default_factory=lambda: np.zeros(0))
    steps: list[np.ndarray] = field(default_factory=list)
    changes: list[np.ndarray] = field(default_factory=list)
    iterations: int = 0
    evaluations: int = 0
    converged: bool = False
    reason: str = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that ``load`` reads, whole or not at all. Local: call it on one rank."""
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        rows = np.zeros((0, self.x.size))
        with part.open("wb") as file:
            np.savez(
                file,
                x=self.x,
                value=self.value,
                gradient=self.gradient,
                steps=np.array(self.steps) if self.steps else rows,
                changes=np.array(self.changes) if self.changes else rows,
                counts=np.array([self.iterations, self.evaluations]),
            )
        os.replace(part, target)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LbfgsState:
        """What ``save`` wrote, on any number of ranks. Local."""
        with np.load(path) as file:
            iterations, evaluations = (int(count) for count in file["counts"])
            return LbfgsState(
                x=file["x"],
                value=float(file["value"]),
                gradient=file["gradient"],
                steps=list(file["steps"]),
                changes=list(file["changes"]),
                iterations=iterations,
                evaluations=evaluations,
            )


def minimize_lbfgs(
    share: Share,
    start: np.ndarray | LbfgsState,
    *,
    iterations: int = 100,
    memory: int = 10,
    gradient_tolerance: float = 1e-6,
    value_tolerance: float = 1e-12,
    callback: Callable[[LbfgsState], Any] | None = None,
    process_set: ProcessSet = global_process_set,
) -> LbfgsState:
    """Minimizes the sum over the ranks of ``share``. Collective.

    share: takes parameters (float64, [n], equal on all ranks, not to be written to) and returns
    this rank's part of the value and of the gradient ([n]).
    start: the first parameters, or a state to go on from, with its history; that of the first rank
    of the set counts. It is not changed.
    iterations: at most so many more. memory: pairs of the recursion that are kept.
    gradient_tolerance: ends when no component of the gradient is larger. value_tolerance: ends when
    an iteration lowers the value by less than this part of it.
    callback: called after every iteration, on the ranks that give one; what it returns is ignored.
    The state it gets is that of the minimization: save it, do not change it.

    Returns the state at the end: ``converged`` unless the iterations were used up or the line
    search found no lower value, which ``reason`` says. Raises InvalidArgument on every rank when
    the arguments are wrong on one, or the value or the gradient is not finite at the start, and
    Mismatch when the ranks give different numbers. What ``share`` or ``callback`` raises on a rank
    is raised there, and an error that names rank and text on the others. They may wait for that
    rank in operations of gradred.diff: so it ends all contexts, see ``gradred.diff.guard``.
    """
    options = (iterations, memory, gradient_tolerance, value_tolerance)
    state, calls_back = _agree_on_start(start, options, callback is not None, process_set)
    evaluate = _Sum(share, state, process_set)
    if not state.gradient.size:
        state.value, state.gradient = evaluate(state.x)
    if not _is_finite(state.value, state.gradient):
        raise InvalidArgument(
            f"minimize_lbfgs: the value ({state.value}) or its gradient is not finite at the start"
        )
    end = state.iterations + iterations
    state.converged, state.reason = False, "all iterations were done"
    while True:
        if np.max(np.abs(state.gradient), initial=0.0) <= gradient_tolerance:
            state.converged, state.reason = True, "the gradient is below gradient_tolerance"
            return state
        if state.iterations == end:
            return state
        direction = _direction(state)
        if not state.steps:
            direction /= max(1.0, float(np.linalg.norm(direction)))
        found = _line_search(evaluate, state, direction)
        if found is None and state.steps:
            # Once more, downhill: the history may be of another curvature.
            state.steps, state.changes = [], []
            continue
        if found is None:
            state.reason = "the line search found no lower value"
            return state
        x, value, gradient = found
        step, change = x - state.x, gradient - state.gradient
        if step @ change > 1e-10 * float(np.linalg.norm(step) * np.linalg.norm(change)):
            state.steps = [*state.steps[-memory + 1 :], step] if memory > 1 else [step]
            state.changes = [*state.changes[-memory + 1 :], change] if memory > 1 else [change]
        fall = state.value - value
        state.x, state.value, state.gradient = x, value, gradient
        state.iterations += 1
        if calls_back:
            _call_back(callback, state, process_set)
        if fall <= value_tolerance * max(abs(value), abs(value + fall), 1e-300):
            state.converged, state.reason = True, "the value fell by less than value_tolerance"
            return state


def _agree_on_start(
    start: np.ndarray | LbfgsState,
    options: tuple[int, int, float, float],
    calls_back: bool,
    process_set: ProcessSet,
) -> tuple[LbfgsState, bool]:
    """A copy of the start, that of the first rank of the set, and whether any rank calls back."""
    ranks = _ranks_of(process_set)
    own: LbfgsState | None = None
    wrong = ""
    try:
        _check(options)
        if basics.rank() == ranks[0]:
            own = _state_at(start)
    except Exception as error:  # which the other ranks are to raise as well
        wrong = str(error) or repr(error)
    own_note = (wrong, options, calls_back)
    notes = allgather_object(own_note, "minimize_lbfgs.start", process_set=process_set)
    for rank, (refusal, theirs, _) in zip(ranks, notes, strict=True):
        if refusal:
            raise InvalidArgument(f"minimize_lbfgs: rank {rank}: {refusal}")
        if theirs != notes[0][1]:
            raise Mismatch(
                f"minimize_lbfgs: the ranks differ: rank {ranks[0]}: {notes[0][1]}, rank {rank}: "
                f"{theirs} (iterations, memory, gradient_tolerance, value_tolerance)"
            )
    state: LbfgsState = broadcast_object(
        own, ranks[0], "minimize_lbfgs.state", process_set=process_set
    )
    return state, any(calls for _, _, calls in notes)


def _check(options: tuple[int, int, float, float]) -> None:
    iterations, memory, *_ = options
    if memory < 1 or iterations < 0:
        raise InvalidArgument(
            f"memory must be at least 1 and iterations at least 0, got {memory} and {iterations}"
        )


def _state_at(start: np.ndarray | LbfgsState) -> LbfgsState:
    state = copy.deepcopy(start) if isinstance(start, LbfgsState) else LbfgsState(x=np.array(start))
    state.x = np.asarray(state.x, dtype=np.float64)
    if state.x.ndim != 1:
        raise InvalidArgument(f"the parameters must have one dimension, got shape {state.x.shape}")
    return state


def _ranks_of(process_set: ProcessSet) -> Sequence[int]:
    return process_set.ranks or range(basics.size())


class _Sum:
    """The whole function: one allreduce an evaluation."""

    def __init__(self, share: Share, state: LbfgsState, process_set: ProcessSet) -> None:
        self._share, self._state, self._process_set = share, state, process_set

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        def evaluate(own: np.ndarray) -> None:
            value, gradient = self._share(x)
            gradient = np.asarray(gradient, dtype=np.float64)
            if gradient.shape != x.shape:
                raise InvalidArgument(
                    f"minimize_lbfgs: the gradient has shape {gradient.shape}, expected {x.shape}"
                )
            own[0], own[1:] = value, gradient

        self._state.evaluations += 1
        both = _together(
            evaluate, 1 + x.size, "evaluation", self._state.evaluations, self._process_set
        )
        return float(both[0]), both[1:]


def _call_back(
    callback: Callable[[LbfgsState], Any] | None, state: LbfgsState, process_set: ProcessSet
) -> None:
    def call(_: np.ndarray) -> None:
        if callback is not None:
            callback(state)

    _together(call, 0, "callback", state.iterations, process_set)


def _together(
    function: Callable[[np.ndarray], None],
    count: int,
    kind: str,
    number: int,
    process_set: ProcessSet,
) -> np.ndarray:
    """The sum over the ranks of what ``function`` puts into its argument, zeros of [count].

    A rank where it fails still takes part, so that no other waits for it, here or in an operation
    of gradred.diff. All raise.
    """
    what, name = f"{kind} {number} of minimize_lbfgs", f"minimize_lbfgs.{kind}"
    failure: Exception | None = None
    own = np.zeros(1 + count)
    try:
        with diff.guard(what=what):
            function(own[1:])
    except Exception as error:
        failure = error
        own[:] = 0
        own[0] = 1
    total = collectives.allreduce(own, ReduceOp.Sum, name, process_set=process_set)
    if total[0] == 0:
        return total[1:]
    text = None if failure is None else as_text(failure)
    texts = allgather_object(text, f"{name}.failures", process_set=process_set)
    if failure is not None:
        raise failure
    ranks = _ranks_of(process_set)
    failed = [f"rank {r}: {t}" for r, t in zip(ranks, texts, strict=True) if t is not None]
    raise Abandoned(f"{what} failed on other ranks: " + "; ".join(failed))


def _is_finite(value: float, gradient: np.ndarray) -> bool:
    return math.isfinite(value) and bool(np.all(np.isfinite(gradient)))


def _direction(state: LbfgsState) -> np.ndarray:
    """Algorithm 7.4, with the scaling of equation 7.20."""
    q = -state.gradient
    pairs = list(zip(state.steps, state.changes, strict=True))
    alphas = []
    for step, change in reversed(pairs):
        alpha = float(step @ q) / float(step @ change)
        alphas.append(alpha)
        q = q - alpha * change
    if pairs:
        step, change = pairs[-1]
        q = q * (float(step @ change) / float(change @ change))
    for (step, change), alpha in zip(pairs, reversed(alphas), strict=True):
        q = q + (alpha - float(change @ q) / float(step @ change)) * step
    return q


@dataclass
class _Point:
    at: float
    value: float
    slope: float
    x: np.ndarray
    gradient: np.ndarray


def _line_search(
    evaluate: _Sum, state: LbfgsState, direction: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray] | None:
    """Algorithms 3.5 and 3.6: a point that meets the strong Wolfe conditions.

    Where the evaluations run out first, the lowest point that meets the first of them; None when
    there is none. Values that are not finite count as too large.
    """
    start = _Point(0.0, state.value, float(state.gradient @ direction), state.x, state.gradient)
    if not start.slope < 0:
        return None
    best: _Point | None = None

    def try_at(at: float) -> _Point:
        nonlocal best
        x = state.x + at * direction
        value, gradient = evaluate(x)
        finite = _is_finite(value, gradient)
        point = _Point(
            at,
            value if finite else math.inf,
            float(gradient @ direction) if finite else math.inf,
            x,
            gradient,
        )
        if is_low(point) and (best is None or point.value < best.value):
            best = point
        return point

    def is_low(point: _Point) -> bool:
        return point.value <= start.value + _ARMIJO * point.at * start.slope

    def is_flat(point: _Point) -> bool:
        return abs(point.slope) <= -_CURVATURE * start.slope

    low, high = start, None
    at = 1.0
    for _ in range(_LINE_EVALUATIONS):
        point = try_at(at)
        if not is_low(point) or point.value >= low.value:
            high = point
        elif is_flat(point):
            return point.x, point.value, point.gradient
        elif high is None and point.slope < 0:
            low = point
            at = min(2 * at, _LONGEST_STEP)
            continue
        else:
            # The minimum lies between the lowest point and the one it falls towards.
            if high is None or point.slope * (high.at - low.at) >= 0:
                high = low
            low = point
        if abs(high.at - low.at) <= 1e-14 * max(1.0, abs(low.at)):
            break
        at = _between(low, high)
    return None if best is None else (best.x, best.value, best.gradient)


def _between(low: _Point, high: _Point) -> float:
    """The minimizer of the cubic through both (equation 3.59), off the ends; else the middle."""
    middle = 0.5 * (low.at + high.at)
    if not (math.isfinite(high.value) and math.isfinite(high.slope)):
        return middle
    length = high.at - low.at
    d1 = low.slope + high.slope - 3 * (high.value - low.value) / length
    inside = d1 * d1 - low.slope * high.slope
    if inside < 0:
        return middle
    d2 = math.copysign(math.sqrt(inside), length)
    bottom = high.slope - low.slope + 2 * d2
    if bottom == 0:
        return middle
    at = high.at - length * (high.slope + d2 - d1) / bottom
    margin = 0.1 * abs(length)
    first, last = sorted((low.at, high.at))
    return at if first + margin <= at <= last - margin else middle
