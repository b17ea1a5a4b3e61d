"""What a recording says about each domain: steps, waits, what was hidden, who was late."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from gradred.launch.trace_file import Interval, Trace, intervals

_MOST_GROUPS = 5

Span = tuple[float, float]


@dataclass
class _Batch:
    """One pass over a domain on one rank; us."""

    step: Span | None = None
    wait: Span | None = None
    reduces: list[Interval] = field(default_factory=list)  # of groups

    def plan(self) -> tuple[tuple[int, int], ...]:
        """Numbers and bytes of its groups: plans of a domain change while it is measured."""
        return tuple(sorted((p.group or 0, p.nbytes) for p in self.reduces))


@dataclass
class _Domain:
    batches: dict[tuple[int, int], _Batch] = field(default_factory=dict)  # by rank and batch
    negotiations: dict[tuple[int, int], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # by batch and group: rank -> when it was ready there

    def add(self, rank: int, phase: Interval) -> None:
        batch = self.batches.setdefault((rank, phase.batch), _Batch())
        if phase.phase == "step":
            batch.step = (phase.begin, phase.end)
        elif phase.phase == "wait":
            batch.wait = (phase.begin, phase.end)
        elif phase.group is not None and phase.phase == "negotiation":
            self.negotiations[phase.batch, phase.group][rank] = phase.begin
        elif phase.group is not None and phase.phase == "reduce":
            batch.reduces.append(phase)


def summary(traces: Sequence[Trace]) -> str:
    """The text of ``gradred trace summary``."""
    domains: dict[str, _Domain] = {}
    for trace in traces:
        for phase in intervals(trace.events):
            domains.setdefault(phase.domain, _Domain()).add(trace.rank, phase)
    lines = [_job_line(traces)]
    for name, domain in sorted(domains.items(), key=lambda d: -_busy(d[1])):
        lines += ["", *_domain_lines(name, domain, len(traces))]
    notes = [
        f"rank {trace.rank} at {e['ts'] / 1e6:.3f} s: {e['name']}: {e['args']['text']}"
        for trace in traces
        for e in trace.events
        if e["name"] in ("stall", "abort")
    ]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines) + "\n"


def _job_line(traces: Sequence[Trace]) -> str:
    times = [e["ts"] + e.get("dur", 0) for trace in traces for e in trace.events]
    seconds = (max(times) - min(times)) / 1e6 if times else 0.0
    rounds = [e for t in traces for e in t.events if e["ph"] == "X" and e["tid"] >= 1000]
    empty = sum(e["name"] == "empty round" for e in rounds)
    text = (
        f"{len(traces)} of {traces[0].info['size']} ranks, {seconds:.3f} s; "
        f"rounds a rank: {len(rounds) / len(traces):.0f}, {empty / len(traces):.0f} of them empty"
    )
    off = max(t.info["clock_uncertainty_ns"] for t in traces) / 1000
    if off > 0:
        text += f"; clocks agree within {off:.1f} us"
    if lost := sum(t.lost for t in traces):
        text += f"; {lost} events were lost: figures are of the others"
    return text


def _busy(domain: _Domain) -> float:
    return sum(p.end - p.begin for b in domain.batches.values() for p in b.reduces)


def _length(spans: Iterable[Span]) -> float:
    """Of the union, us."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _domain_lines(name: str, domain: _Domain, ranks: int) -> list[str]:
    whole = {key: b for key, b in domain.batches.items() if b.step and b.wait}
    lines = [f"{name}"]
    if not whole:
        return [*lines, "  no step was recorded from its begin to its end"]
    steps = [b.step[1] - b.step[0] for b in whole.values() if b.step]
    waits = [b.wait[1] - b.wait[0] for b in whole.values() if b.wait]
    reduces = sum(_length((p.begin, p.end) for p in b.reduces) for b in whole.values())
    exposed = sum(
        _length((max(p.begin, b.wait[0]), p.end) for p in b.reduces if p.end > b.wait[0])
        for b in whole.values()
        if b.wait
    )
    lines.append(
        f"  steps: {len(whole) / ranks:g} a rank, median {_us(median(steps))} "
        f"from the first to the last tensor; {_interval(whole)}"
    )
    lines.append(
        f"  wait after the last submit: median {_us(median(waits))}, max {_us(max(waits))}"
    )
    if reduces > 0:
        hidden = 100 * (1 - exposed / reduces)
        lines.append(
            f"  communication: mean {_us(reduces / len(whole))} a step, {hidden:.0f} % of it "
            "before the last submit (hidden)"
        )
        phases = [p for b in whole.values() for p in b.reduces]
        lines.append(
            f"  of that the data thread packs {_us(sum(p.pack for p in phases) / len(whole))}, "
            f"sums {_us(sum(p.sum for p in phases) / len(whole))}, "
            f"unpacks {_us(sum(p.unpack for p in phases) / len(whole))}"
        )
    plans = Counter(b.plan() for b in whole.values())
    [(plan, count)] = plans.most_common(1)
    share = f", in {100 * count / len(whole):.0f} % of the steps" if count < len(whole) else ""
    nbytes = sum(size for _, size in plan)
    lines.append(f"  bytes: {nbytes} a step in {len(plan)} groups{share}")
    lines += _late(domain)
    lines += _largest([p for b in whole.values() if b.plan() == plan for p in b.reduces])
    return lines


def _interval(batches: dict[tuple[int, int], _Batch]) -> str:
    """From one step's begin to the next one's, which is what a training step takes."""
    begins: dict[int, list[float]] = defaultdict(list)
    for (rank, _), batch in sorted(batches.items()):
        if batch.step:
            begins[rank].append(batch.step[0])
    gaps = [b - a for times in begins.values() for a, b in itertools.pairwise(times)]
    return f"a new one every {_us(median(gaps))}" if gaps else "only one"


def _late(domain: _Domain) -> list[str]:
    """Who is ready last: the one that the others wait for."""
    last: Counter[int] = Counter()
    behind: dict[int, list[float]] = defaultdict(list)
    for ready in domain.negotiations.values():
        if len(ready) < 2:
            continue
        (before, _), (latest, rank) = sorted((at, rank) for rank, at in ready.items())[-2:]
        last[rank] += 1
        behind[rank].append(latest - before)
    if not last:
        return []
    rank, count = last.most_common(1)[0]
    share = 100 * count / sum(last.values())
    by = _us(median(behind[rank]))
    return [f"  slowest: rank {rank} is last in {share:.0f} % of groups, by {by} (median)"]


def _largest(reduces: Iterable[Interval]) -> list[str]:
    """Of the groups of one plan."""
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for phase in reduces:
        times[phase.nbytes, phase.group or 0].append(phase.end - phase.begin)
    lines = []
    for nbytes, group in sorted(times, key=lambda key: (-key[0], key[1]))[:_MOST_GROUPS]:
        took = median(times[nbytes, group])
        rate = f", {nbytes / took / 1000:.2f} GB/s" if took > 0 and nbytes > 0 else ""
        lines.append(f"  group {group}: {nbytes} bytes, median {_us(took)}{rate}")
    return lines


def _us(microseconds: float) -> str:
    """ "12.3 us", "4.5 ms", "6.7 s"."""
    if microseconds < 1000:
        return f"{microseconds:.1f} us"
    if microseconds < 1e6:
        return f"{microseconds / 1000:.2f} ms"
    return f"{microseconds / 1e6:.2f} s"
