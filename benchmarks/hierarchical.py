"""Reduction over virtual nodes whose network is TCP, against one that knows no nodes.

    python benchmarks/hierarchical.py --out benchmarks/results/hierarchical.json

Both jobs run on this machine. In one its ranks are cut into nodes, in the other each rank is a node
of its own, so that all bytes go through MPI, which is told to use TCP alone.
"""

from __future__ import annotations

from typing import Any

from bench import chart
from bench.job import Jobs, alternate
from bench.measure import summarize
from bench.report import Report, Target, arguments, nbytes_text, table, time_text

_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}


def block(count: int, iterations: int) -> dict[str, Any]:
    """Sums in a block, with the bytes that went through the network. Collective."""
    import contestants
    from bench.measure import loop

    import gradred

    tensor = contestants.Tensor(count, "float32")
    contestant = contestants._contestant
    assert contestant is not None
    contestant.tensor(tensor)

    def counters() -> dict[str, float]:
        found = getattr(gradred.metrics(), "network_bytes", None)
        return {} if found is None else {"network_bytes": float(found)}

    return loop(
        contestant.run,
        iterations,
        2,
        contestant.prepare,
        lambda: tensor.check(contestant.result()),
        counters,
    )


def one(report: Report, nodes: int, local_size: int, nbytes: int, options: Any) -> dict[str, float]:
    """A shape of job: hierarchical and flat, alternating. Names -> medians."""
    ranks = nodes * local_size
    with Jobs() as jobs:
        for name, count in (("hierarchical", nodes), ("flat", ranks)):
            env = {**_TCP, "GRADRED_VIRTUAL_NODES": str(count)}
            job = jobs.start(name, ranks, env)
            with jobs.turn(name):
                job.call("contestants.begin", kind="gradred")

        def run(name: str) -> list[Any]:
            with jobs.turn(name) as job:
                count = nbytes // 4
                return job.call("hierarchical.block", count=count, iterations=options.iterations)

        blocks = alternate(["hierarchical", "flat"], options.rounds, run)
    figures = {name: summarize(found) for name, found in blocks.items()}
    shape = f"{nodes}x{local_size}"
    expected = 2 * (nodes - 1) / nodes * nbytes / local_size
    rows = []
    for name, f in figures.items():
        moved = f.extra.get("network_bytes")
        row = {"shape": shape, "contestant": name, "nbytes": nbytes, "expected_bytes": expected}
        report.rows.append({**row, "network_bytes": moved, **vars(f)})
        through = "-" if moved is None else f"{moved / 1e6:.2f} MB"
        rows.append([name, time_text(f.median_s), time_text(f.p99_s), through, str(f.wrong)])
    head = [f"{shape}, {nbytes_text(nbytes)}, TCP", "median", "p99", "through the network", "wrong"]
    print("\n" + table(head, rows), flush=True)
    ratio = figures["hierarchical"].median_s / figures["flat"].median_s
    report.targets.append(Target(f"{shape}: hierarchical over flat", ratio, 0.7))
    moved = figures["hierarchical"].extra.get("network_bytes")
    if moved is None:
        report.note("there is no metric network_bytes yet")
    else:
        # What is not the tensor's, such as negotiation, is small beside it.
        away = abs(moved - expected) / expected
        note = f"{moved:.0f} bytes a rank and step, expected {expected:.0f}"
        report.targets.append(Target(f"{shape}: bytes off the expected", away, 0.01, "", note))
    return {f"{shape} {name}": f.median_s * 1e3 for name, f in figures.items()}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0], ranks=None)
    parser.add_argument("--shapes", default="2x2,4x2", help="nodes x ranks of each")
    parser.add_argument("--bytes", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6, help="a block")
    options = parser.parse_args(argv)
    if options.quick:
        options.shapes, options.bytes, options.rounds, options.iterations = "2x2", 1 << 16, 1, 2
    report = Report("hierarchical", dict(vars(options)))
    bars: dict[str, float] = {}
    for shape in options.shapes.split(","):
        nodes, local_size = map(int, shape.split("x"))
        bars |= one(report, nodes, local_size, options.bytes, options)
    wrong = sum(row["wrong"] for row in report.rows)
    report.targets.append(Target("wrong elements", wrong, 0))
    report.picture = chart.bars(f"allreduce of {nbytes_text(options.bytes)} over TCP", "ms", bars)
    report.write(options.out)


if __name__ == "__main__":
    main()
