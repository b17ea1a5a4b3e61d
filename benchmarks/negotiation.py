"""What agreeing costs: rounds, first agreements, waiting and being idle.

python benchmarks/negotiation.py --out benchmarks/results/negotiation.json
"""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

import contestants
from bench import chart
from bench.job import JobError, Jobs, alternate
from bench.measure import engine_cpu_s, loop, me, summarize
from bench.report import Report, Target, arguments, table, time_text

NAMES = (1, 10, 100, 1000, 10_000)
RANKS = (2, 4, 8)
_VIRTUAL = {"GRADRED_VIRTUAL_NODES": "2"}  # of two ranks: each is a node, MPI is between them


# In the ranks.


def agree(count: int, attempt: int, groups: int, iterations: int) -> dict[str, Any]:
    """``count`` tensors of 4 bytes that no rank has named before, then the same names again.

    groups: how many messages they travel in. Returns the block of the later ones, with the first
    one's seconds. Collective.
    """
    import numpy as np

    from gradred._native import core

    domain = f"agree.{count}.{groups}.{attempt}"
    entry = {"op": "allreduce", "reduce_op": "sum", "dtype": "float32", "wire": "float32"}
    entry |= {"shape": [], "prescale": 1.0, "postscale": 1.0, "root": 0}
    entries = [{**entry, "label": f"layer_{i}/kernel.{attempt}"} for i in range(count)]
    inputs = [np.ones((), np.float32) for _ in range(count)]
    ends = [count * (k + 1) // groups for k in range(groups)]
    spec = core.Spec(domain, 0, entries, ends)

    def run() -> None:
        nonlocal results
        results = core.run(spec, inputs)

    def counters() -> dict[str, float]:
        metrics = core.metrics()
        return {name: float(metrics[name]) for name in ("rounds", "unions")}

    results: list[Any] = []
    me.barrier()
    begun = time.perf_counter()
    run()
    first = time.perf_counter() - begun
    block = loop(run, iterations, 1, None, None, counters)
    block["wrong"] = sum(int(result[0] != me.size) for result in results)
    block["checked"] = count
    block["extra"]["first_s"] = first * iterations  # a sum over the iterations, as the others
    return block


def rest(seconds: float) -> dict[str, float]:
    """CPU seconds of the process and of the engine while nothing is asked for. Local."""
    before, engine, begun = time.process_time(), engine_cpu_s(), time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - begun
    return {"cpu": (time.process_time() - before) / passed, "engine": engine_cpu_s() - engine}


def straggle(late_s: float) -> dict[str, float]:
    """The last rank comes late; the others wait for it. Share of a core that waiting takes."""
    contestant = contestants._contestant
    assert contestant is not None
    contestant.tensor(contestants.Tensor(1 << 18, "float32"))
    contestant.prepare()
    contestant.run()
    me.barrier()
    contestant.prepare()
    if me.rank == me.size - 1:
        time.sleep(late_s)
        contestant.run()
        return {"cpu": 0.0, "waited_s": 0.0}
    begun, before = time.perf_counter(), time.process_time()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    contestant.run()
    passed = time.perf_counter() - begun
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
    share = (time.process_time() - before) / passed
    return {"cpu": share, "waited_s": passed, "switches_a_s": switches / passed}


# In the parent.


def agreement(jobs: Jobs, count: int, groups: int, rounds: int) -> dict[str, Any]:
    """Figures of a list of names: the first call's seconds, the later ones, the call alone."""
    iterations = max(3, min(200, 20_000 // count))

    def block(name: str, attempt: int) -> list[Any]:
        given = {"count": count, "groups": groups, "attempt": attempt, "iterations": iterations}
        with jobs.turn(name) as job:
            return job.call("negotiation.agree", 300, **given)

    null = summarize([block("null", 0)]).median_s
    blocks = [block("gradred", attempt) for attempt in range(rounds)]
    first = [max(rank["extra"]["first_s"] for rank in b) / iterations for b in blocks]
    return {"first_s": statistics.median(first), "null_s": null, **vars(summarize(blocks))}


def agreements(report: Report, options: Any) -> dict[str, dict[float, float]]:
    """First agreement and later calls, by names and ranks; one message, and one a tensor."""
    series: dict[str, dict[float, float]] = {}
    rows = []
    for ranks in options.rank_counts:
        with Jobs() as jobs:
            for name, env in (("gradred", {}), ("null", {"GRADRED_NULL": "1"})):
                jobs.start(name, ranks, env)
                with jobs.turn(name) as job:
                    job.call("contestants.begin", kind="gradred")
            for count, groups in [(n, g) for n in options.names for g in sorted({1, n})]:
                found = agreement(jobs, count, groups, options.rounds)
                key = {"part": "names", "ranks": ranks, "names": count, "groups": groups}
                report.rows.append({**key, **found})
                times = [found[k] for k in ("first_s", "median_s", "p99_s", "null_s")]
                rows.append(
                    [
                        f"{ranks} ranks, {count} names, {groups} groups",
                        *map(time_text, times),
                        f"{found['extra']['rounds']:.1f}",
                        time_text(found["engine_cpu_s"]),
                        str(found["wrong"]),
                    ]
                )
                if groups == 1:
                    for what, seconds in (("first", times[0]), ("later", times[1])):
                        line = series.setdefault(f"{what}, {ranks} ranks", {})
                        line[count] = 1e6 * seconds
    head = ["tensors of 4 bytes", "first", "later", "p99", "null", "rounds", "engine's CPU"]
    print("\n" + table([*head, "wrong"], rows), flush=True)
    return series


def costs(report: Report, options: Any) -> None:
    """Latency against CPU, idle ranks, and a rank that waits for a straggler."""
    places = {
        "gradred": ("gradred", {}),
        "gradred over MPI": ("gradred", _VIRTUAL),
        "horovod": ("horovod", {}),
        "tuned": ("tuned", contestants.KINDS["tuned"].env),
    }
    with Jobs() as jobs:
        rows, names = [], []
        for name, (kind, env) in places.items():
            if kind != "gradred" and (options.quick or not contestants.available(kind)):
                report.note(f"{name}: not installed here (make peers), or left out by --quick")
                continue
            jobs.start(name, 2, env)
            try:
                with jobs.turn(name) as job:
                    job.call("contestants.begin", kind=kind)
            except JobError as error:
                report.note(f"{name}: does not start: {error}")
                jobs.end(name)
                continue
            names.append(name)

        def latency(name: str) -> list[Any]:
            given = {"count": 4, "dtype": "float32", "iterations": options.calls, "warmup": 5}
            with jobs.turn(name) as job:
                return job.call("contestants.block", **given)

        blocks = alternate(names, options.rounds, latency)
        for name in names:
            figures = summarize(blocks[name])
            with jobs.turn(name) as job:
                idle = max(r["cpu"] for r in job.call("negotiation.rest", seconds=options.idle_s))
                waits = [
                    job.call("negotiation.straggle", late_s=options.late_s)[0]
                    for _ in range(options.rounds)
                ]
            waiting = statistics.median(w["cpu"] for w in waits)
            row = {"part": "costs", "contestant": name, "idle_cpu": idle, "waiting_cpu": waiting}
            report.rows.append({**row, "waits": waits, **vars(figures)})
            rows.append(
                [
                    name,
                    time_text(figures.median_s),
                    time_text(figures.p99_s),
                    time_text(figures.cpu_s),
                    time_text(figures.engine_cpu_s),
                    f"{100 * idle:.2f} %",
                    f"{100 * waiting:.2f} %",
                ]
            )
            if name.startswith("gradred"):
                limit = 5.0 if name.endswith("MPI") else 1.0
                what = f"{name}: waiting {options.late_s:g} s for a straggler"
                report.targets.append(Target(what, 100 * waiting, limit, "% of a core"))
                report.targets.append(Target(f"{name}: idle", 100 * idle, 0.5, "% of a core"))
    head = ["2 ranks, 16 bytes", "median", "p99", "CPU a call", "engine's", "idle", "waiting"]
    print("\n" + table(head, rows), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0], ranks=None)
    add = parser.add_argument
    add("--rank-counts", type=lambda t: [int(n) for n in t.split(",")], default=list(RANKS))
    add("--names", type=lambda t: [int(n) for n in t.split(",")], default=list(NAMES))
    add("--rounds", type=int, default=3)
    add("--calls", type=int, default=300, help="calls of 16 bytes a block")
    add("--idle-s", type=float, default=5.0, help="seconds without work")
    add("--late-s", type=float, default=2.0, help="how late the straggler is")
    options = parser.parse_args(argv)
    if options.quick:
        options.rank_counts, options.names, options.rounds = [2], [1, 50], 1
        options.calls, options.idle_s, options.late_s = 5, 0.3, 0.1
    report = Report("negotiation", dict(vars(options)))
    series = agreements(report, options)
    costs(report, options)
    wrong = sum(row["wrong"] for row in report.rows)
    report.targets.append(Target("wrong elements", wrong, 0))
    report.picture = chart.lines("agreeing on names", "names", "microseconds", series)
    report.write(options.out)


if __name__ == "__main__":
    main()
