"""Algorithms between nodes by size: where one overtakes another.

    python benchmarks/algorithms.py --out benchmarks/results/algorithms.json

Each rank is a node of its own, so all bytes go through MPI: over TCP on the loopback interface, and
over MPI's shared memory, which stands for a fast network.
"""

from __future__ import annotations

from typing import Any

from bench import chart
from bench.job import Jobs, alternate
from bench.measure import Figures, summarize
from bench.report import Report, Target, arguments, nbytes_text, table, time_text

NETWORKS = {
    "tcp": {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    },
    "shared": {},
}
ALGORITHMS = ("recursive_doubling", "recursive_halving", "pairwise", "ring", "native")
SIZES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]


def measure(network: str, ranks: int, options: Any) -> dict[int, dict[str, Figures]]:
    """All algorithms at all sizes, alternating: by bytes, by algorithm."""
    found: dict[int, dict[str, Figures]] = {}
    with Jobs() as jobs:
        for name in options.algorithms:
            env = {
                **NETWORKS[network],
                "GRADRED_VIRTUAL_NODES": str(ranks),
                "GRADRED_REPRODUCIBLE": "0",
                "GRADRED_ALGORITHMS": f"allreduce:0={name}",
            }
            job = jobs.start(name, ranks, env)
            with jobs.turn(name):
                job.call("contestants.begin", kind="gradred")
        for nbytes in options.sizes:
            found[nbytes] = at_size(jobs, nbytes, options)
    return found


def at_size(jobs: Jobs, nbytes: int, options: Any) -> dict[str, Figures]:
    def block(name: str, iterations: int) -> list[Any]:
        with jobs.turn(name) as job:
            given = {"count": nbytes // 4, "dtype": "float32", "warmup": 2}
            return job.call("contestants.block", iterations=iterations, **given)

    trial = {name: summarize([block(name, 3)]).median_s for name in options.algorithms}
    iterations = {
        n: max(3, min(500, int(options.block_s / max(t, 1e-6)))) for n, t in trial.items()
    }
    blocks = alternate(
        options.algorithms, options.rounds, lambda name: block(name, iterations[name]), nbytes
    )
    return {name: summarize(found) for name, found in blocks.items()}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0], ranks=None)
    add = parser.add_argument
    add("--networks", type=lambda t: t.split(","), default=list(NETWORKS))
    add("--rank-counts", type=lambda t: [int(n) for n in t.split(",")], default=[2, 4])
    add("--algorithms", type=lambda t: t.split(","), default=list(ALGORITHMS))
    add("--sizes", type=lambda t: [int(n) for n in t.split(",")], default=SIZES, help="bytes")
    add("--rounds", type=int, default=3)
    add("--block-s", type=float, default=0.05, help="seconds a block")
    options = parser.parse_args(argv)
    if options.quick:
        options.networks, options.rank_counts, options.sizes = ["shared"], [2], [1 << 10, 64 << 10]
        options.rounds, options.block_s = 1, 0.005
    report = Report("algorithms", dict(vars(options)))
    series: dict[str, dict[float, float]] = {}
    for network in options.networks:
        for ranks in options.rank_counts:
            found = measure(network, ranks, options)
            rows = []
            for nbytes, figures in found.items():
                key = {"network": network, "ranks": ranks, "nbytes": nbytes}
                report.rows += [{**key, "algorithm": n, **vars(f)} for n, f in figures.items()]
                times = [time_text(figures[name].median_s) for name in options.algorithms]
                fastest = min(figures, key=lambda name: figures[name].median_s)
                rows.append([nbytes_text(nbytes), *times, fastest])
                for name, f in figures.items():
                    line = series.setdefault(f"{network}, {ranks} ranks: {name}", {})
                    line[nbytes] = 1e6 * f.median_s
            head = [f"{network}, {ranks} ranks", *options.algorithms, "fastest"]
            print("\n" + table(head, rows), flush=True)
    wrong = sum(row["wrong"] for row in report.rows)
    report.targets.append(Target("wrong elements", wrong, 0))
    names = {float(n): nbytes_text(n) for n in options.sizes}
    report.picture = chart.lines("allreduce between nodes", "bytes", "microseconds", series, names)
    report.write(options.out)


if __name__ == "__main__":
    main()
