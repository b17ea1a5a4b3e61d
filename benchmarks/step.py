"""A whole step of many gradients: each by itself, grouped, and by a tape; beside Horovod.

python benchmarks/step.py --out benchmarks/results/step.json
"""

from __future__ import annotations

import random
from typing import Any

import contestants
import trainers
from bench import chart
from bench.job import Jobs, alternate
from bench.measure import SETTLE_STEPS, Figures, summarize
from bench.report import Report, Target, arguments, nbytes_text, table, time_text

MODES = ("each", "grouped", "tape")
PEERS = {
    "gradred": ("gradred", {}),
    "null": ("gradred", {"GRADRED_NULL": "1"}),
    "horovod": ("horovod", {}),
    "tuned": ("horovod", contestants.KINDS["tuned"].env),
}


def many(count: int = 160, total_mb: float = 53.0) -> list[int]:
    """Elements of gradients as a deep network has them: kernels of many sizes, and biases."""
    rng = random.Random(1)
    kernels = [4.0 ** rng.uniform(0, 4) for _ in range(count // 2)]
    scale = total_mb * 1e6 / 4 / sum(kernels)
    sizes = [max(16, int(k * scale)) for k in kernels]
    return [n for kernel in sizes for n in (kernel, max(4, int(kernel**0.5) // 4))]


def large(count: int = 28, total_mb: float = 224.0) -> list[int]:
    return [int(total_mb * 1e6 / 4 / count)] * count


def start(jobs: Jobs, ranks: int, report: Report) -> list[str]:
    """The contestants that there are, and the copy loop."""
    names = trainers.start(jobs, PEERS, ranks, report)
    jobs.start("copy", ranks, launcher="local")
    with jobs.turn("copy") as job:
        job.call("contestants.begin", kind="copy")
    return names


def one(
    jobs: Jobs, names: list[str], counts: list[int], mode: str, options: Any
) -> dict[str, Figures]:
    """A list of gradients in one mode, all contestants alternating, and the copy loop."""
    for name in names:
        with jobs.turn(name) as job:
            job.call("programs.build", 300, key="step", kind="gradients", counts=counts, mode=mode)

    def block(name: str, warmup: int = 3) -> list[Any]:
        with jobs.turn(name) as job:
            if name == "copy":
                return job.call(
                    "contestants.block",
                    count=sum(counts),
                    dtype="float32",
                    iterations=options.iterations,
                    warmup=2,
                )
            return job.call(
                "programs.run", 300, key="step", iterations=options.iterations, warmup=warmup
            )

    planned = mode == "tape" and not options.quick
    for name in names:  # first agreements, buffers, measured plans
        block(name, SETTLE_STEPS if planned and name == "gradred" else 3)
    blocks = alternate([*names, "copy"], options.rounds, block)
    for name in names:
        with jobs.turn(name) as job:
            job.call("programs.forget", key="step")
    return {name: summarize(found) for name, found in blocks.items()}


def targets(
    report: Report, what: str, mode: str, nbytes: int, figures: dict[str, Figures], copy_gb_s: float
) -> None:
    ours, null = figures["gradred"], figures["null"]
    copy = figures["copy"].median_s
    limit = null.median_s + 1.25 * copy
    note = f"TensorFlow alone {null.median_s * 1e3:.1f} ms, copy loop {copy * 1e3:.1f} ms"
    report.targets.append(
        Target(f"{what}, {mode}: step", ours.median_s * 1e3, limit * 1e3, "ms", note)
    )
    # The copy loop reads and writes each byte three times: pack, sum, unpack.
    seconds = 6 * nbytes / (copy_gb_s * 1e9)
    note = f"6 x {nbytes / 1e6:.0f} MB at {copy_gb_s:.1f} GB/s"
    cpu = ours.cpu_s - null.cpu_s
    report.targets.append(
        Target(f"{what}, {mode}: CPU", cpu * 1e3, 1.3 * seconds * 1e3, "ms", note)
    )
    for peer in ("horovod", "tuned"):
        if peer in figures:
            ratio = ours.median_s / figures[peer].median_s
            report.targets.append(Target(f"{what}, {mode}: over {peer}", ratio, 1.0))


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0])
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=8, help="steps a block")
    options = parser.parse_args(argv)
    sets = {"160 gradients": many(), "28 large": large()}
    if options.quick:
        options.rounds, options.iterations, options.modes = 1, 2, "tape"
        sets = {"8 gradients": many(8, 1.0)}
    report = Report("step", dict(vars(options)))
    bars: dict[str, float] = {}
    with Jobs() as jobs:
        names = start(jobs, options.ranks, report)
        for what, counts in sets.items():
            nbytes = 4 * sum(counts)
            with jobs.turn("copy") as job:
                blocks = job.call("contestants.copy_bandwidth", nbytes=nbytes, iterations=5)
            copy_gb_s = 2 * nbytes / summarize([blocks]).median_s / 1e9
            rows = []
            for mode in options.modes.split(","):
                figures = one(jobs, names, counts, mode, options)
                for name, f in figures.items():
                    row = {"set": what, "mode": mode, "contestant": name, "nbytes": nbytes}
                    report.rows.append({**row, "copy_gb_s": copy_gb_s, **vars(f)})
                    rows.append(
                        [
                            f"{mode} {name}",
                            time_text(f.median_s),
                            time_text(f.p99_s),
                            time_text(f.cpu_s),
                            time_text(f.engine_cpu_s),
                            f"{f.faults:.0f}",
                            str(f.wrong),
                        ]
                    )
                    if mode == "tape":
                        bars[f"{what}: {name}"] = f.median_s * 1e3
                targets(report, what, mode, nbytes, figures, copy_gb_s)
            head = [f"{what}, {nbytes_text(nbytes)}", "step", "p99", "CPU", "engine's", "faults"]
            print("\n" + table([*head, "wrong"], rows), flush=True)
    wrong = sum(row["wrong"] for row in report.rows)
    report.targets.append(Target("wrong elements", wrong, 0))
    report.picture = chart.bars("a step with a tape", "ms", bars)
    report.write(options.out)


if __name__ == "__main__":
    main()
