"""How much of an allreduce hides behind the backward pass, and which groups hide most.

    python benchmarks/overlap.py --out benchmarks/results/overlap.json

Three parts: calibrated work on the core, the same with sleep instead (a device computes), and a
real network. Every step runs with gradred and, alternating, with GRADRED_NULL=1.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench import chart
from bench.job import Job, Jobs, alternate
from bench.measure import SETTLE_STEPS, Figures, slowest, summarize
from bench.report import Report, Target, arguments, table, time_text

# Layers from the first to the last; the backward pass goes the other way. Sizes grow towards the
# output as in convolutional networks, so that neither "all" nor "each" is best.
LAYER_MB = (0.02, 0.1, 0.1, 0.4, 0.4, 1.0, 2.0, 4.0, 4.0, 2.0, 1.0, 0.01)
LAYER_MS = (2.0, 2.0, 1.5, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5)
PAIRS = 4  # blocks of auto and of the fastest cut, a round


def settings_of(nbytes: int, count: int) -> dict[str, Any]:
    """The ways to group that are compared: name -> the argument ``groups``."""
    return {
        "one group": 1,
        "a group a tensor": count,
        "4 equal counts": 4,
        "4 of equal bytes": f"{max(1, nbytes // 4)}B",
        "layers": "layer",
        "auto": "auto",
    }


class Bench:
    """Programs in two jobs, one of which returns its inputs, and blocks of their steps."""

    def __init__(self, jobs: Jobs, rounds: int, iterations: int) -> None:
        self.jobs, self.rounds, self.iterations = jobs, rounds, iterations
        self._made = itertools.count()

    def build(self, job: str, kind: str, **arguments: Any) -> tuple[str, str]:
        key = str(next(self._made))
        with self.jobs.turn(job) as ranks:
            ranks.call("programs.build", 300, key=key, kind=kind, **arguments)
        return job, key

    def block(self, program: tuple[str, str], iterations: int, warmup: int = 2) -> list[Any]:
        job, key = program
        with self.jobs.turn(job) as ranks:
            return ranks.call("programs.run", 300, key=key, iterations=iterations, warmup=warmup)

    def measure(
        self, programs: dict[str, tuple[str, str]], rounds: int | None = None
    ) -> dict[str, Figures]:
        """Figures of all programs, alternating. A plan that is measured gets its steps first."""
        for name, program in programs.items():
            self.block(program, 1, SETTLE_STEPS if name == "auto" else 2)
        found = alternate(
            list(programs),
            rounds or self.rounds,
            lambda name: self.block(programs[name], self.iterations),
        )
        return {name: summarize(blocks) for name, blocks in found.items()}

    def forget(self, program: tuple[str, str]) -> None:
        with self.jobs.turn(program[0]) as ranks:
            ranks.call("programs.forget", key=program[1])


def artificial(
    bench: Bench, report: Report, counts: Sequence[int], work: Sequence[int], sleep: bool
) -> tuple[dict[str, Figures], float]:
    """Calibrated work, or sleep: (figures, seconds of the step without communication)."""
    title = "sleep" if sleep else "work"
    nbytes, n = 4 * sum(counts), len(counts)
    settings = settings_of(nbytes, n)
    given = {"kind": "layers", "counts": list(counts), "sleep": sleep}
    steps = {
        name: bench.build("gradred", **given, units=list(work), groups=groups)
        for name, groups in settings.items()
    }
    alone = {
        name: bench.build("gradred", **given, units=[0] * n, groups=groups)
        for name, groups in settings.items()
    }
    nothing = {
        "null": bench.build("null", **given, units=list(work), groups=1),
        "null alone": bench.build("null", **given, units=[0] * n, groups=1),
    }
    figures = bench.measure({**steps, "null": nothing["null"]})
    alones = bench.measure({**alone, "null": nothing["null alone"]}, max(2, bench.rounds // 2))
    best = bound(bench, counts, work, sleep, figures["null"].median_s)
    base = figures["null"].median_s
    rows = []
    for name in settings:
        f, a = figures[name], alones[name]
        cost = f.median_s - base
        apart = max(a.median_s - alones["null"].median_s, 1e-9)
        row = {
            "part": title,
            "groups_setting": name,
            "cost_s": cost,
            "wait_s": f.extra.get("wait_s", math.nan),
            "alone_s": apart,
            "hidden_share": 1 - cost / apart,
            "more_cpu_s": f.cpu_s - figures["null"].cpu_s,
            **vars(f),
        }
        report.rows.append(row)
        rows.append(
            [
                name,
                f"{f.extra.get('groups', math.nan):g}",
                time_text(f.median_s),
                time_text(max(cost, 0)),
                time_text(row["wait_s"]),
                time_text(apart),
                f"{row['hidden_share']:.2f}",
                time_text(max(row["more_cpu_s"], 0)),
                str(f.wrong),
            ]
        )
    head = [f"{n} layers, {title}", "groups", "step", "cost", "wait", "alone", "hidden"]
    print("\n" + table([*head, "more CPU", "wrong"], rows))
    print(f"without communication {time_text(base)}; bound {time_text(best)}", flush=True)
    report.rows.append({"part": title, "groups_setting": "bound", "median_s": best})
    report.rows.append({"part": title, "groups_setting": "null", **vars(figures["null"])})
    for program in [*steps.values(), *alone.values(), *nothing.values()]:
        bench.forget(program)
    return figures, base


def bound(
    bench: Bench, counts: Sequence[int], work: Sequence[int], sleep: bool, base_s: float
) -> float:
    """A step that no grouping can beat, if compute and communication do not disturb each other.

    All that is ready after a moment has still to travel: the longest, over moments, of the moment
    and the time of the rest as one group alone. That time is a line through two measured ones.
    """
    sizes = [max(1, sum(counts) // 64), sum(counts)]
    given = {"kind": "layers", "units": [0], "groups": 1, "sleep": sleep}
    times = []
    for size in sizes:
        pair = {
            "gradred": bench.build("gradred", **given, counts=[size]),
            "null": bench.build("null", **given, counts=[size]),
        }
        found = bench.measure(pair, 2)
        times.append(max(0.0, found["gradred"].median_s - found["null"].median_s))
        for program in pair.values():
            bench.forget(program)
    slope = max(0.0, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    start = max(0.0, times[0] - slope * sizes[0])
    total = sum(work)
    best, done = base_s, 0.0
    for i in reversed(range(len(counts))):
        done += work[i]
        best = max(best, base_s * done / total + start + slope * sum(counts[: i + 1]))
    return best


def brute_force(
    bench: Bench, report: Report, counts: Sequence[int], work: Sequence[int], keep: int
) -> None:
    """All ways to cut the layers into groups, with sleeping compute, against auto."""
    n = len(counts)
    order = list(reversed(range(n)))
    given = {"kind": "layers", "counts": list(counts), "units": list(work), "sleep": True}

    def cut(mask: int) -> list[list[int]]:
        groups = [[order[0]]]
        for i in range(1, n):
            if mask >> (i - 1) & 1:
                groups.append([])
            groups[-1].append(order[i])
        return groups

    # All once with few steps, the best of them again. The fastest of those owes some of its place
    # to chance, so it and auto are measured anew for the ratio, in pairs of blocks.
    first: dict[int, float] = {}
    for mask in range(1 << (n - 1)):
        program = bench.build("gradred", **given, groups=cut(mask))
        first[mask] = statistics.median(slowest(bench.block(program, 3, 1)))
        bench.forget(program)
    best = sorted(first, key=first.__getitem__)[:keep]
    programs = {str(m): bench.build("gradred", **given, groups=cut(m)) for m in best}
    figures = bench.measure(programs)
    winner = min(figures, key=lambda k: figures[k].median_s)
    groups = [len(members) for members in cut(int(winner))]
    fastest = figures[winner].median_s
    print(f"\nbrute force, {len(first)} ways: {time_text(fastest)} with groups of {groups} tensors")
    report.settings["brute_force"] = {"ways": len(first), "best_groups": groups}
    programs["auto"] = bench.build("gradred", **given, groups="auto")
    pair = {name: programs[name] for name in (winner, "auto")}
    again = bench.measure(pair, PAIRS * bench.rounds)
    ratio = statistics.median(
        ours / best_s
        for ours, best_s in zip(again["auto"].medians_s, again[winner].medians_s, strict=True)
    )
    figures |= {"auto": again["auto"], f"{winner} again": again[winner]}
    note = (
        f"{len(first)} ways to cut {n} layers; best groups: {groups}, auto "
        f"{again['auto'].extra.get('groups', 0):g} groups; "
        f"{len(again['auto'].medians_s)} pairs of blocks"
    )
    report.targets.append(Target("auto over brute force, sleeping", ratio, 1.02, "", note))
    for name, f in figures.items():
        report.rows.append({"part": "brute force", "groups_setting": name, **vars(f)})
    for program in programs.values():
        bench.forget(program)


def real(bench: Bench, report: Report, name: str, rounds: int) -> None:
    """A network: each setting, and a paired comparison of auto with the best fixed one."""
    with bench.jobs.turn("gradred") as job:
        facts = job.call("programs.network_facts", name=name)[0]
    settings = settings_of(int(facts["nbytes"]), int(facts["gradients"]))
    programs = {
        key: bench.build("gradred", "network", name=name, groups=groups)
        for key, groups in settings.items()
    }
    programs["null"] = bench.build("null", "network", name=name, groups=1)
    figures = bench.measure(programs, rounds)
    nothing = figures["null"].medians_s
    rows = []
    for key, f in figures.items():
        # Paired by round: the machine changes slowly.
        pairs = zip(f.medians_s, nothing, strict=True)
        cost = statistics.median(ours - null for ours, null in pairs)
        wait = f.extra.get("wait_s", 0.0)
        report.rows.append(
            {"part": name, "groups_setting": key, "cost_s": cost, "wait_s": wait, **vars(f)}
        )
        rows.append(
            [
                key,
                f"{f.extra.get('groups', 0):g}",
                time_text(f.median_s),
                time_text(max(cost, 0)),
                time_text(wait),
                time_text(max(f.cpu_s - figures["null"].cpu_s, 0)),
            ]
        )
    head = [f"{name}, {facts['nbytes'] / 1e6:.1f} MB", "groups", "step", "cost", "wait", "more CPU"]
    print("\n" + table(head, rows), flush=True)
    fixed = {k: f for k, f in figures.items() if k not in ("auto", "null")}
    best = min(fixed, key=lambda k: statistics.mean(fixed[k].medians_s))
    t, mean_s, error_s = paired(figures["auto"].medians_s, fixed[best].medians_s)
    note = (
        f"t of {rounds} paired blocks, above 1.83 is slower (5 %); best fixed: {best}; "
        f"auto - best: {1e3 * mean_s:.1f} ms, standard error {1e3 * error_s:.1f} ms"
    )
    report.targets.append(Target(f"{name}: auto against the best fixed", t, 1.83, "", note))


def paired(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Of the differences: Student's t, positive if ``values`` are larger, mean, standard error."""
    differences = [a - b for a, b in zip(values, others, strict=True)]
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return 0.0, mean, 0.0
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return (mean / error if error else 0.0), mean, error


def start(jobs: Jobs, ranks: int) -> Job:
    for name, env in (("gradred", {}), ("null", {"GRADRED_NULL": "1"})):
        job = jobs.start(name, ranks, env)
        with jobs.turn(name):
            job.call("programs.begin", library="gradred")
    return jobs["gradred"]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--parts", default="work,sleep,brute,real")
    add("--scale", type=float, default=1.0, help="of the gradients' sizes")
    add("--work", type=float, default=1.0, help="of the time of the layers")
    add("--layers", type=int, default=10, help="of the brute force, the last ones; at most 12")
    add("--keep", type=int, default=12, help="how many of the brute force are measured again")
    add("--network", default="wide", help="dense, wide or diffraction")
    add("--rounds", type=int, default=5)
    add("--iterations", type=int, default=8, help="steps a block")
    options = parser.parse_args(argv)
    mb, ms = LAYER_MB, LAYER_MS
    if options.quick:
        mb, ms, options.layers = mb[-3:], ms[-3:], 2
        options.rounds, options.iterations, options.keep = 1, 2, 2
        options.network = "dense"
    counts = [max(1, int(options.scale * m * 1e6 / 4)) for m in mb]
    report = Report("overlap", {**vars(options), "layer_mb": mb, "layer_ms": ms})
    with Jobs() as jobs:
        bench = Bench(jobs, options.rounds, options.iterations)
        with jobs.turn(start(jobs, options.ranks).name) as job:
            units_a_ms = statistics.median(job.call("programs.work_units_a_ms"))
        report.settings["work_units_a_ms"] = units_a_ms
        arithmetic = [int(units_a_ms * options.work * m) for m in ms]
        sleeping = [int(1e6 * options.work * m) for m in ms]
        parts = options.parts.split(",")
        hidden: dict[str, float] = {}
        for part, work in (("work", arithmetic), ("sleep", sleeping)):
            if part in parts:
                figures, base = artificial(bench, report, counts, work, part == "sleep")
                for name, f in figures.items():
                    hidden[f"{part}: {name}"] = 1e3 * (f.median_s - base)
        report.picture = chart.bars("cost of communication in a step", "ms", hidden)
        if "brute" in parts:
            last = slice(len(counts) - options.layers, None)
            brute_force(bench, report, counts[last], sleeping[last], options.keep)
        if "real" in parts:
            real(bench, report, options.network, 1 if options.quick else 10)
    wrong = sum(row.get("wrong", 0) for row in report.rows)
    report.targets.append(Target("wrong elements", wrong, 0))
    report.write(options.out)


if __name__ == "__main__":
    main()
