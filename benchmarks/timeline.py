"""What recording a timeline costs a step: the same steps with and without, alternating in one job.

python benchmarks/timeline.py --ranks 2 --out benchmarks/results/timeline.json
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import step
from bench.job import Jobs, alternate
from bench.measure import SETTLE_STEPS, loop, me, summarize
from bench.report import Report, Target, arguments, table, time_text

LIMIT = 1.01


@dataclass(frozen=True)
class Steps:
    """Steps of TensorFlow as in step.py; "arrays": one call on arrays, nothing is computed."""

    counts: list[int]  # elements of each gradient, float32
    mode: str = "arrays"
    target: bool = True


STEPS = {
    "160 gradients, 53 MB, tape": Steps(step.many(), "tape"),
    "160 gradients, 53 MB, each": Steps(step.many(), "each"),
    "28 gradients, 224 MB, tape": Steps(step.large(), "tape"),
    "160 arrays, 53 MB": Steps([83_000] * 160),
    "28 arrays, 53 MB": Steps([474_000] * 28),
    "16 bytes": Steps([4], target=False),
}


class _Rank:
    arrays: list[np.ndarray]


_rank = _Rank()


def begin(counts: list[int], mode: str) -> None:
    """In the ranks: gradients of so many elements. Collective."""
    if mode != "arrays":
        import programs

        programs.begin("gradred")
        programs.build("step", "gradients", counts=counts, mode=mode)
        programs.run("step", SETTLE_STEPS if mode == "tape" and len(counts) > 8 else 3)
        return
    import gradred

    gradred.init()
    _rank.arrays = [np.full(count, me.rank + 1.0, np.float32) for count in counts]


def _steps_on_arrays(iterations: int) -> dict[str, Any]:
    import gradred

    results: list[np.ndarray] = []

    def one() -> None:
        results[:] = gradred.grouped_allreduce(_rank.arrays, gradred.Sum, name="gradients")

    def check() -> tuple[int, int]:
        total = me.size * (me.size + 1) / 2
        return sum(int((r != total).sum()) for r in results), sum(r.size for r in results)

    return loop(one, iterations, warmup=2, check=check)


def block(recording: bool, folder: str, mode: str, iterations: int) -> dict[str, Any]:
    """In the ranks: a block of steps; `cpu_s`, of the whole block, has the writing of the file."""
    import gradred

    if recording:
        gradred.start_timeline(f"{folder}/timeline.json")
    begun = time.process_time()
    if mode == "arrays":
        found = _steps_on_arrays(iterations)
    else:
        import programs

        found = programs.run("step", iterations)
    gradred.stop_timeline()
    found["cpu_s"] = (time.process_time() - begun) * iterations / (iterations + 2)  # and warm-up
    return found


def ratio(on: list[float], off: list[float]) -> float:
    """Of blocks that alternated: the machine changes slowly."""
    return statistics.median(a / b for a, b in zip(on, off, strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20, help="blocks with and without")
    parser.add_argument("--block-s", type=float, default=0.3, help="seconds a block")
    options = parser.parse_args(argv)
    steps = STEPS
    if options.quick:
        options.rounds, options.block_s = 2, 0.02
        steps = {"160 arrays": Steps([100] * 160), "8 gradients, tape": Steps([100] * 8, "tape")}
    report = Report("timeline", {k: v for k, v in vars(options).items() if k != "out"})
    if importlib.util.find_spec("tensorflow") is None:
        report.note("no TensorFlow here: arrays alone")
        steps = {name: s for name, s in steps.items() if s.mode == "arrays"}
    rows = []
    with Jobs() as jobs, tempfile.TemporaryDirectory(prefix="gradred-bench-") as folder:
        for name, what in steps.items():
            jobs.start(name, options.ranks)
            with jobs.turn(name) as job:
                job.call("timeline.begin", 300, counts=what.counts, mode=what.mode)

                def run(kind: str, iterations: int, job: Any = job, mode: str = what.mode) -> Any:
                    given = {"folder": folder, "mode": mode, "iterations": iterations}
                    return job.call("timeline.block", 300, recording=kind == "on", **given)

                trial = summarize([run("off", 5)])
                count = max(5, min(2000, int(options.block_s / trial.median_s)))
                blocks = alternate(["off", "on"], options.rounds, lambda k, n=count: run(k, n))
                nbytes = sum(p.stat().st_size for p in Path(folder).iterdir())
            jobs.end(name)
            off, on = (summarize(blocks[kind]) for kind in ("off", "on"))
            wall = ratio(on.medians_s, off.medians_s)
            cpu = ratio(*([summarize([b]).cpu_s for b in blocks[kind]] for kind in ("on", "off")))
            per_step = nbytes / options.ranks / (count + 2)
            for kind, figures in (("off", off), ("on", on)):
                report.rows.append({"step": name, "timeline": kind, **vars(figures)})
            report.rows[-1] |= {"wall_ratio": wall, "cpu_ratio": cpu, "file_nbytes": per_step}
            rows.append([name, time_text(off.median_s), time_text(on.median_s), f"{wall:.4f}"])
            rows[-1] += [f"{cpu:.4f}", f"{per_step:.0f} B", str(on.wrong + off.wrong)]
            print(f"{name} done", file=sys.stderr)
            if what.target:
                note = f"{time_text(off.median_s)} a step; {per_step:.0f} B of the file"
                report.targets.append(Target(f"{name}: on over off", wall, LIMIT, "", note))
                report.targets.append(Target(f"{name}: CPU on over off", cpu, LIMIT, "", note))
    print(table(["a step", "off", "on", "on/off", "CPU on/off", "file", "wrong"], rows))
    report.write(options.out)


if __name__ == "__main__":
    main()
