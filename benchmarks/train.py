"""Training: images a second against independent processes, and what communication costs.

python benchmarks/train.py --out benchmarks/results/train.json
"""

from __future__ import annotations

import statistics
from typing import Any

import contestants
import trainers
from bench import chart
from bench.job import Jobs, alternate
from bench.measure import SETTLE_STEPS, slowest, summarize
from bench.report import Report, Target, arguments, table

PEERS = {
    "independent": ("none", {}),
    "gradred": ("gradred", {}),
    "null": ("gradred", {"GRADRED_NULL": "1"}),
    "horovod": ("horovod", {}),
    "tuned": ("horovod", contestants.KINDS["tuned"].env),
}
# As "null", but the ranks meet before each step: what synchronous training pays where their steps
# differ in length.
IN_STEP = "in step"
# Seconds that one block of steps should take.
NETWORKS = {"dense": 0.5, "wide": 2.0, "diffraction": 1.0}


def step_s(name: str, block: list[Any]) -> float:
    """Seconds a step of a block, over the ranks: the mean, since images a second add up."""
    if name == IN_STEP:
        return statistics.mean(slowest(block))
    rates = [len(rank["times_s"]) / sum(rank["times_s"]) for rank in block]
    return 1 / statistics.mean(rates)


def one(jobs: Jobs, names: list[str], network: str, options: Any) -> dict[str, list[float]]:
    """Seconds a step in each block, name -> blocks."""
    for name in names:
        with jobs.turn(name) as job:
            given = {"kind": "network", "name": network, "batch": options.batch}
            job.call("programs.build", 300, key="net", **given)

    def block(name: str, iterations: int) -> list[Any]:
        # No barriers else: ranks drift apart as they do in training.
        with jobs.turn("null" if name == IN_STEP else name) as job:
            together = name == IN_STEP
            return job.call(
                "programs.run", 300, key="net", iterations=iterations, warmup=2, together=together
            )

    if not options.quick and "gradred" in names:
        block("gradred", SETTLE_STEPS)
    trial = {name: step_s(name, block(name, 5)) for name in names}
    wished = options.block_s or NETWORKS[network]
    iterations = max(2 if options.quick else 8, int(wished / min(trial.values())))
    turns = [*names, IN_STEP] if "null" in names else names
    found = alternate(turns, options.rounds, lambda name: block(name, iterations))
    for name in names:
        with jobs.turn(name) as job:
            job.call("programs.forget", key="net")
    return {name: [step_s(name, b) for b in blocks] for name, blocks in found.items()}


def copy_gb_s(jobs: Jobs, nbytes: int) -> float:
    """Bytes read and written a second by memcpy of that many, on all ranks at once."""
    with jobs.turn("gradred") as job:
        blocks = job.call("contestants.copy_bandwidth", nbytes=nbytes, iterations=5)
    return 2 * nbytes / summarize([blocks]).median_s / 1e9


def last_alone(jobs: Jobs, nbytes: int) -> tuple[int, float]:
    """Bytes of the last group of the plan that gradred has settled on, and seconds of their sum."""
    with jobs.turn("gradred") as job:
        last = job.call("programs.last_group", nbytes=nbytes)[0]
        blocks = job.call("programs.sum_alone", nbytes=last, iterations=20)
    return last, summarize([blocks]).median_s


def report_network(
    report: Report,
    network: str,
    facts: dict[str, float],
    found: dict[str, list[float]],
    ranks: int,
    gb_s: float,
    last: tuple[int, float] | None,
) -> None:
    """gb_s: of copies of the gradients. last: of the last group its bytes and seconds;
    of the 50 MB network alone."""
    step = {name: statistics.median(times) for name, times in found.items()}
    null = step["null"]
    rows = []
    for name, seconds in step.items():
        images = ranks * facts["batch"] / seconds
        # Paired by block: the machine changes slowly.
        pairs = zip(found["independent"], found[name], strict=True)
        share = statistics.median(alone / ours for alone, ours in pairs)
        cost = statistics.median(
            ours - nothing for nothing, ours in zip(found["null"], found[name], strict=True)
        )
        report.rows.append(
            {
                "network": network,
                "contestant": name,
                "step_s": seconds,
                "images_per_second": images,
                "of_independent": share,
                "cost_s": cost,
                "steps_s": found[name],
                **facts,
            }
        )
        cells = [f"{seconds * 1e3:.2f} ms", f"{images:.1f}", f"{share:.3f}"]
        rows.append([name, *cells, f"{cost * 1e3:.2f} ms", f"{100 * cost / null:.1f} %"])
    head = [f"{network}, {facts['nbytes'] / 1e6:.1f} MB of gradients", "step", "images/s"]
    head += ["of independent", "cost", "of the step"]
    print("\n" + table(head, rows), flush=True)
    mine, without, in_step = (
        next(r for r in report.rows if (r["network"], r["contestant"]) == (network, name))
        for name in ("gradred", "null", IN_STEP)
    )
    # Packed, summed and unpacked: each byte is read and written three times.
    counted = 6 * facts["nbytes"] / (gb_s * 1e9)
    note = (
        f"{1e3 * mine['cost_s']:.2f} ms of {1e3 * null:.1f}; counted bytes, 6 x "
        f"{facts['nbytes'] / 1e6:.1f} MB at {gb_s:.1f} GB/s, {1e3 * counted:.2f} ms, "
        f"{100 * counted / null:.1f} %; without communication {without['of_independent']:.3f} of "
        f"independent processes, and {in_step['of_independent']:.3f} where the ranks wait for each "
        f"other, {1e3 * in_step['cost_s']:.2f} ms"
    )
    if network == "dense":
        what = "dense network: 1 - images/s over independent processes"
        report.targets.append(Target(what, 1 - mine["of_independent"], 0.02, "", note))
    if last is not None:
        what = "50 MB network: cost of communication in the step"
        nbytes, alone = last
        limit = max(2.0, 100 * alone / null + 1.0)
        note += f"; the last group, {nbytes / 1e6:.1f} MB, takes {1e3 * alone:.2f} ms alone"
        report.targets.append(Target(what, 100 * mine["cost_s"] / null, limit, "%", note))
    for peer in ("horovod", "tuned"):
        if peer in step:
            ratio = step["gradred"] / step[peer]
            report.targets.append(Target(f"{network}: step over {peer}", ratio, 1.0))


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, help="samples a step and rank, of each network")
    parser.add_argument("--block-s", type=float, help="seconds a block")
    options = parser.parse_args(argv)
    if options.quick:
        options.networks, options.rounds, options.block_s = "dense", 1, 0.01
    report = Report("train", dict(vars(options)))
    bars: dict[str, float] = {}
    with Jobs() as jobs:
        names = trainers.start(jobs, PEERS, options.ranks, report)
        for network in options.networks.split(","):
            with jobs.turn("independent") as job:
                facts = job.call("programs.network_facts", name=network)[0]
            facts["batch"] = options.batch or facts["batch"]
            found = one(jobs, names, network, options)
            rate = copy_gb_s(jobs, int(facts["nbytes"]))
            last = last_alone(jobs, int(facts["nbytes"])) if network == "wide" else None
            report_network(report, network, facts, found, options.ranks, rate, last)
            for row in report.rows:
                if row["network"] == network and row["contestant"] != "independent":
                    bars[f"{network}: {row['contestant']}"] = row["of_independent"]
    report.picture = chart.bars("images a second, as a share of independent processes", "", bars)
    report.write(options.out)


if __name__ == "__main__":
    main()
