"""Scaling of the acoustic propagator, and how near it comes to the bandwidth of memory.

    python benchmarks/pde_scaling.py --out benchmarks/results/pde_scaling.json
    python benchmarks/pde_scaling.py --devito DEVITO_ENVIRONMENT/bin/python ...

The sizes are those of a published study of solvers coupled with TensorFlow over MPI: one of its
tasks has 32 cores. Jobs take turns. Times are of whole calls from TensorFlow, float64.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from bench import chart
from bench.job import JobError, Jobs, alternate
from bench.measure import Figures, loop, summarize
from bench.report import Report, Target, arguments, table, time_text

# Seconds on one task: forward, gradient.
PUBLISHED = {"strong": (3.743, 15.24), "weak": (1.083, 3.77)}
PUBLISHED_POISSON_S = 11.0  # on one core
LAYER = 20
# Bytes that a node's step must move: u, the speed and u one step before read, u written.
_NODE_NBYTES = 4 * 8
_GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}

# The propagation, with steps kept for a gradient and without.
_kept: Any = None
_plain: Any = None
_inputs: Any = None
_triad: Any = None
_poisson: Any = None


def begin(nodes: list[int], steps: int, threads: int, memory_nbytes: int, layer: int) -> None:
    """Makes the problem on this rank. Collective."""
    global _kept, _plain, _inputs
    import numpy as np

    import gradred
    import tensorflow as tf
    from gradred.diff import Context
    from gradred.pde import AcousticWave, Grid

    gradred.init()
    context = Context(dims=_GRIDS[gradred.size()])
    grid = Grid(nodes, context)
    middle = [n // 2 for n in nodes]
    given = {
        "dt": 0.5,
        "steps": steps,
        "sources": [tuple(middle)],
        "receivers": [(middle[0] // 2, middle[1])],
        "layer": layer,
        "threads": threads,
    }
    _plain = AcousticWave(grid, keep=False, **given)
    _kept = AcousticWave(grid, memory_nbytes=memory_nbytes, **given)
    _inputs = (tf.ones(grid.block_shape, tf.float64), tf.constant(np.ones((steps, 1))))


def forward(iterations: int) -> dict[str, Any]:
    """A block of propagations. Collective."""
    return loop(lambda: _plain(*_inputs), iterations, 1, counters=lambda: _plain.traffic._asdict())


def gradient(iterations: int) -> dict[str, Any]:
    """A block of propagations with the gradient by speed and signals. Collective."""
    import tensorflow as tf

    def run() -> None:
        with tf.GradientTape() as tape:
            tape.watch(_inputs)
            records = _kept.grid.context.end(_kept(*_inputs))
        tape.gradient(records, _inputs)

    return loop(run, iterations, 1, counters=lambda: _kept.traffic._asdict())


def begin_poisson(nodes: int, preconditioner: str) -> None:
    """Makes a Poisson problem with a smooth coefficient on this rank. Collective."""
    global _poisson
    import numpy as np

    import gradred
    import tensorflow as tf
    from gradred.diff import Context
    from gradred.pde import Grid, Poisson

    gradred.init()
    spacing = 1 / (nodes + 1)
    grid = Grid((nodes, nodes), Context(dims=_GRIDS[gradred.size()]), spacing=spacing)
    problem = Poisson(grid)
    x, y = problem.points.T
    coefficient = tf.constant(1 + 0.5 * np.sin(3 * x) * np.cos(2 * y))
    source = tf.ones(grid.block_shape, tf.float64)
    _poisson = (problem, coefficient, source, {"preconditioner": preconditioner, "rtol": 1e-8})


def solve(iterations: int) -> dict[str, Any]:
    """A block of assemblies and solves. Collective."""
    problem, coefficient, source, options = _poisson
    return loop(lambda: problem(coefficient, source, **options), iterations, 0)


def solve_gradient(iterations: int) -> dict[str, Any]:
    """A block of the same with the gradient by the coefficient. Collective."""
    import tensorflow as tf

    problem, coefficient, source, options = _poisson

    def run() -> None:
        with tf.GradientTape() as tape:
            tape.watch(coefficient)
            u = problem.grid.context.end(problem(coefficient, source, **options))
        tape.gradient(u, coefficient)

    return loop(run, iterations, 0)


def triad(count: int, iterations: int) -> dict[str, Any]:
    """A block of triads on this rank's core, while the other ranks do the same."""
    global _triad
    import numpy as np
    from bench import native

    if _triad is None:
        _triad = [np.full(count, value) for value in (0.0, 1.0, 2.0)]
    return loop(lambda: native.triad(*_triad), iterations, 1)


def devito(python: Path, options: Any) -> list[float]:
    """Seconds of Devito's propagations of the same equation, without and with its damping."""
    script = Path(__file__).parent / "devito_wave.py"
    command = [str(python), str(script), str(options.nodes), str(options.steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__.split("\n", 1)[0], ranks=None)
    parser.add_argument("--nodes", type=int, default=1000, help="of the strong scaling")
    parser.add_argument("--steps", type=int, default=100, help="of the strong scaling")
    parser.add_argument("--weak-nodes", type=int, default=100, help="a rank, along each dimension")
    parser.add_argument("--weak-steps", type=int, default=2000)
    parser.add_argument("--poisson-nodes", type=int, default=1800, help="along each dimension")
    parser.add_argument("--preconditioner", default="boomeramg", help="of Poisson's equation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3, help="a block")
    parser.add_argument("--devito", type=Path, help="a Python that has Devito: the peer")
    options = parser.parse_args(argv)
    layer, triad_count = LAYER, 20_000_000
    if options.quick:
        options.nodes, options.steps, options.weak_nodes, options.weak_steps = 60, 10, 20, 20
        options.poisson_nodes = 40
        options.rounds = options.iterations = 1
        layer, triad_count = 5, 100_000
    report = Report("pde_scaling", dict(vars(options)))
    strong: dict[str, Figures] = {}
    with Jobs() as jobs:
        run_strong(jobs, options, layer, triad_count, strong)
    rows = [row(report, "strong", name, figures, options) for name, figures in strong.items()]
    weak: dict[str, Figures] = {}
    with Jobs() as jobs:
        run_weak(jobs, options, layer, weak)
    rows += [row(report, "weak", name, figures, options) for name, figures in weak.items()]
    head = ["acoustic wave", "median", "p99", "exchanges", "messages", "bytes", "published"]
    print("\n" + table(head, rows), flush=True)
    judge(report, strong, options, triad_count)
    poisson: dict[str, Figures] = {}
    try:
        with Jobs() as jobs:
            run_poisson(jobs, report, options, poisson)
    except JobError as error:
        cause = next((line for line in str(error).splitlines() if "HYPRE" in line), None)
        if cause is None:
            raise
        report.note(f"Poisson left out: {cause}")
    if options.devito is not None:
        compare(report, options)
    bars = {name: f.median_s * 1e3 for name, f in {**strong, **weak}.items() if "triad" not in name}
    report.picture = chart.bars("acoustic wave: whole calls", "ms", bars)
    report.write(options.out)


def run_strong(
    jobs: Jobs, options: Any, layer: int, triad_count: int, found: dict[str, Figures]
) -> None:
    """One grid on 1, 2, 4 ranks and 1, 2 threads; a gradient with checkpoints; triads."""
    field_nbytes = options.nodes**2 * 8
    shapes = [(1, 1), (1, 2), (2, 1), (4, 1)]
    names = []
    for ranks, threads in shapes:
        name = f"{ranks} ranks x {threads} threads"
        with_checkpoints = [1 << 40] + ([40 * field_nbytes] if (ranks, threads) == (1, 1) else [])
        for memory in with_checkpoints:
            part = name if memory == 1 << 40 else f"{name}, checkpoints"
            jobs.start(part, ranks, bind=threads == 1)
            with jobs.turn(part) as job:
                job.call(
                    "pde_scaling.begin",
                    nodes=[options.nodes] * 2,
                    steps=options.steps,
                    threads=threads,
                    memory_nbytes=memory,
                    layer=layer,
                )
            names += [(part, kind) for kind in ("forward", "gradient") if memory == 1 << 40]
            names += [(part, "gradient")] if memory != 1 << 40 else []
    names += [(f"{ranks} ranks x 1 threads", "triad") for ranks in (1, 2)]

    def block(key: str) -> list[Any]:
        name, kind = key.split(": ")
        with jobs.turn(name) as job:
            given = {"count": triad_count} if kind == "triad" else {}
            return job.call(f"pde_scaling.{kind}", iterations=options.iterations, **given)

    keys = [f"{name}: {kind}" for name, kind in names]
    blocks = alternate(keys, options.rounds, block)
    found.update({key: summarize(blocks[key]) for key in keys})


def run_weak(jobs: Jobs, options: Any, layer: int, found: dict[str, Figures]) -> None:
    """A block of one size on each of 1, 2, 4 ranks."""
    for ranks, dims in _GRIDS.items():
        jobs.start(f"{ranks} ranks", ranks)
        with jobs.turn(f"{ranks} ranks") as job:
            job.call(
                "pde_scaling.begin",
                nodes=[options.weak_nodes * d for d in dims],
                steps=options.weak_steps,
                threads=1,
                memory_nbytes=1 << 40,
                layer=layer // 2 + 3,
            )

    def block(key: str) -> list[Any]:
        name, kind = key.split(": ")
        with jobs.turn(name) as job:
            return job.call(f"pde_scaling.{kind}", iterations=options.iterations)

    keys = [f"{ranks} ranks: {kind}" for ranks in _GRIDS for kind in ("forward", "gradient")]
    blocks = alternate(keys, options.rounds, block)
    found.update({key: summarize(blocks[key]) for key in keys})


def run_poisson(jobs: Jobs, report: Report, options: Any, found: dict[str, Figures]) -> None:
    """One grid on 1, 2, 4 ranks; once each: a solve takes seconds."""
    rows = []
    for ranks in _GRIDS:
        name = f"{ranks} ranks"
        # HYPRE works over MPI, on one rank too.
        jobs.start(name, ranks, {"GRADRED_TRANSPORT": "mpi"})
        with jobs.turn(name) as job:
            given = {"nodes": options.poisson_nodes, "preconditioner": options.preconditioner}
            job.call("pde_scaling.begin_poisson", **given)
            for kind in ("solve", "solve_gradient"):
                block = job.call(f"pde_scaling.{kind}", timeout_s=300.0, iterations=1)
                figures = summarize([block])
                found[f"{name}: {kind}"] = figures
                report.rows.append(
                    {
                        "scaling": "poisson",
                        "name": f"{name}: {kind}",
                        "nodes": options.poisson_nodes,
                        "published_s_one_core": PUBLISHED_POISSON_S,
                        **vars(figures),
                    }
                )
                rows.append([f"{name}, {kind}", time_text(figures.median_s)])
        jobs.end(name)
    head = [f"Poisson, {options.poisson_nodes} x {options.poisson_nodes} nodes", "time"]
    print("\n" + table(head, rows), flush=True)


def row(report: Report, scaling: str, name: str, figures: Figures, options: Any) -> list[str]:
    """Keeps a result, and makes its line of the table."""
    steps = options.steps if scaling == "strong" else options.weak_steps
    kind = name.split(": ")[1]
    traffic = figures.extra
    share = traffic.get("seconds", 0.0) / figures.median_s
    sweeps = steps * (1 if kind == "forward" else 2)
    messages, nbytes = (traffic.get(key, 0.0) / sweeps for key in ("messages", "nbytes"))
    published = PUBLISHED[scaling][kind == "gradient"] if kind != "triad" else None
    report.rows.append(
        {
            "scaling": scaling,
            "name": name,
            "share_of_exchanges": share,
            "messages_a_step": messages,
            "bytes_a_step": nbytes,
            "published_s_one_task_of_32_cores": published,
            **vars(figures),
        }
    )
    return [
        f"{scaling}, {name}",
        time_text(figures.median_s),
        time_text(figures.p99_s),
        "-" if kind == "triad" else f"{100 * share:.1f} %",
        "-" if kind == "triad" else f"{messages:.2f}",
        "-" if kind == "triad" else f"{nbytes:.0f}",
        "-" if published is None else time_text(published),
    ]


def judge(report: Report, strong: dict[str, Figures], options: Any, triad_count: int) -> None:
    """The figures to reach."""
    one, two = "1 ranks x 1 threads", "2 ranks x 1 threads"
    bandwidth = 24 * triad_count / strong[f"{one}: triad"].median_s
    bound = _NODE_NBYTES * options.nodes**2 * options.steps / bandwidth
    note = f"{bound * 1e3:.0f} ms for the counted bytes at {bandwidth / 1e9:.1f} GB/s"
    forward = strong[f"{one}: forward"].median_s
    report.targets.append(Target("forward over the roofline's time", forward / bound, 2, "", note))
    gain = forward / strong[f"{two}: forward"].median_s
    triad_gain = 2 * strong[f"{one}: triad"].median_s / strong[f"{two}: triad"].median_s
    note = f"gains {gain:.2f} and {triad_gain:.2f}"
    report.targets.append(
        Target(
            "triad's gain from 1 to 2 cores over the wave's", triad_gain / gain, 1 / 0.9, "", note
        )
    )
    plain = strong[f"{one}: gradient"].median_s
    checkpoints = strong[f"{one}, checkpoints: gradient"].median_s
    note = "in the memory of 40 fields"
    report.targets.append(
        Target("gradient with checkpoints over plain", checkpoints / plain, 1.5, "", note)
    )


def compare(report: Report, options: Any) -> None:
    """Devito and this in turn, on one core, each without and with an absorbing edge."""
    with Jobs() as jobs:
        for name, layer in (("without layer", 0), ("with layer", LAYER)):
            jobs.start(name, 1)
            with jobs.turn(name) as job:
                job.call(
                    "pde_scaling.begin",
                    nodes=[options.nodes] * 2,
                    steps=options.steps,
                    threads=1,
                    memory_nbytes=1 << 40,
                    layer=min(layer, options.nodes // 4),
                )
        ours: dict[str, list[float]] = {"without layer": [], "with layer": []}
        theirs: dict[str, list[float]] = {"without layer": [], "with layer": []}
        for _ in range(options.rounds):
            for name, seconds in zip(theirs, devito(options.devito, options), strict=True):
                theirs[name].append(seconds)
            for name in ours:
                with jobs.turn(name) as job:
                    [block] = job.call("pde_scaling.forward", iterations=options.iterations)
                ours[name].append(min(block["times_s"]))
    for name in ours:
        mine, other = min(ours[name]), min(theirs[name])
        report.rows.append({"peer": "Devito", "name": name, "ours_s": mine, "theirs_s": other})
        note = f"{time_text(mine)} and {time_text(other)}"
        report.targets.append(Target(f"forward {name} over Devito's", mine / other, 1.0, "", note))


if __name__ == "__main__":
    main()
