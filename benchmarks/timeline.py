"""What recording a timeline costs a step: the same steps with and without, alternating in one job.

python benchmarks/timeline.py --ranks 2 --out benchmarks/results/timeline.json
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench.job import Jobs, alternate
from bench.measure import loop, me, summarize
from bench.report import Report, Target, arguments, table, time_text

# Elements of the gradients of a step, float32.
STEPS = {
    "160 gradients, 53 MB": [83_000] * 160,
    "28 gradients, 53 MB": [474_000] * 28,
    "16 bytes": [4],
}
LIMIT = 1.01
MOST_OF_ALL = "160 gradients, 53 MB"  # events in a step whose cost is looked at


class _Rank:
    arrays: list[np.ndarray]


_rank = _Rank()


def begin(counts: list[int]) -> None:
    """In the ranks: gradients of so many elements."""
    import gradred

    gradred.init()
    _rank.arrays = [np.full(count, me.rank + 1.0, np.float32) for count in counts]


def block(recording: bool, folder: str, iterations: int) -> dict[str, Any]:
    """In the ranks: a block of steps, each of one grouped allreduce."""
    import gradred

    if recording:
        gradred.start_timeline(f"{folder}/timeline.json")
    results: list[np.ndarray] = []

    def step() -> None:
        results[:] = gradred.grouped_allreduce(_rank.arrays, gradred.Sum, name="gradients")

    def check() -> tuple[int, int]:
        total = me.size * (me.size + 1) / 2
        return sum(int((r != total).sum()) for r in results), sum(r.size for r in results)

    found = loop(step, iterations, warmup=2, check=check)
    gradred.stop_timeline()
    return found


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20, help="blocks with and without")
    parser.add_argument("--block-s", type=float, default=0.3, help="seconds a block")
    options = parser.parse_args(argv)
    steps = STEPS
    if options.quick:
        options.rounds, options.block_s, steps = 2, 0.02, {"160 gradients": [100] * 160}
    report = Report("timeline", {k: v for k, v in vars(options).items() if k != "out"})
    rows = []
    with Jobs() as jobs, tempfile.TemporaryDirectory(prefix="gradred-bench-") as folder:
        for name, counts in steps.items():
            jobs.start(name, options.ranks)
            with jobs.turn(name) as job:
                job.call("timeline.begin", counts=counts)

                def run(kind: str, iterations: int, job: Any = job) -> list[Any]:
                    return job.call(
                        "timeline.block",
                        recording=kind == "on",
                        folder=folder,
                        iterations=iterations,
                    )

                trial = summarize([run("off", 5)])
                count = max(5, min(2000, int(options.block_s / trial.median_s)))
                blocks = alternate(["off", "on"], options.rounds, lambda k, n=count: run(k, n))
                nbytes = sum(p.stat().st_size for p in Path(folder).iterdir())
            jobs.end(name)
            off, on = (summarize(blocks[kind]) for kind in ("off", "on"))
            ratio = on.median_s / off.median_s
            for kind, figures in (("off", off), ("on", on)):
                report.rows.append({"step": name, "timeline": kind, **vars(figures)})
            per_step = nbytes / options.ranks / (count + 2)
            rows.append([name, time_text(off.median_s), time_text(on.median_s), f"{ratio:.4f}"])
            rows[-1] += [f"{per_step:.0f} B", str(on.wrong + off.wrong)]
            if name == MOST_OF_ALL or options.quick:
                report.targets.append(Target(f"{name}: on over off", ratio, LIMIT))
    print(table(["a step", "off", "on", "on/off", "file", "wrong"], rows))
    report.write(options.out)


if __name__ == "__main__":
    main()
