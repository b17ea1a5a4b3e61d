"""Scaling of the acoustic propagator, and how near it comes to the bandwidth of memory.

    python benchmarks/pde_scaling.py --out benchmarks/results/pde_scaling.json
    python benchmarks/pde_scaling.py --parts poisson --preconditioner jacobi
    python benchmarks/pde_scaling.py --parts devito --devito DEVITO_ENVIRONMENT/bin/python

The sizes are those of a published study of solvers coupled with TensorFlow over MPI: one of its
tasks has 32 cores. Jobs take turns, in random order. Times are of whole calls from TensorFlow,
float64. Triads, on three arrays of 64 MB a rank, are measured between the waves: the
gain of two cores is that of the fastest of each.
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
ONE, TWO = "1 ranks x 1 threads", "2 ranks x 1 threads"
TIGHT_FIELDS = 44  # of the grid, in float64: what a gradient with checkpoints may keep
PARTS = ("strong", "weak", "poisson", "devito")
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
    """A block of triads on this rank's core, of its own arrays, while the others do the same."""
    global _triad
    import numpy as np
    from bench import native

    if _triad is None:
        _triad = [np.full(count, value) for value in (0.0, 1.0, 2.0)]
    return loop(lambda: native.triad(*_triad), 5 * iterations, 1)


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
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=5, help="a block")
    parser.add_argument("--devito", type=Path, help="a Python that has Devito: the peer")
    parser.add_argument("--parts", default=",".join(PARTS[:3]), help=f"of {','.join(PARTS)}")
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: expected some of {','.join(PARTS)}, got {','.join(unknown)}")
    if "devito" in parts and options.devito is None:
        parser.error("--parts devito: expected --devito, a Python that has it")
    layer, triad_count, grids = LAYER, 8_000_000, dict(_GRIDS)
    if options.quick:
        options.nodes, options.steps, options.weak_nodes, options.weak_steps = 60, 10, 20, 20
        options.poisson_nodes = 40
        options.rounds = options.iterations = 1
        layer, triad_count = 5, 100_000
        del grids[4]
    report = Report("pde_scaling", dict(vars(options)))
    bars: dict[str, float] = {}
    if "strong" in parts:
        strong = run_strong(options, grids, layer, triad_count)
        show(report, "strong", strong, options)
        judge(report, strong, options, triad_count)
        bars |= {f"strong, {n}": f.median_s for n, f in strong.items() if "triad" not in n}
    if "weak" in parts:
        weak = run_weak(options, grids, layer)
        show(report, "weak", weak, options)
        bars |= {f"weak, {name}": figures.median_s for name, figures in weak.items()}
    if "poisson" in parts:
        bars |= run_poisson(report, options, grids)
    if "devito" in parts:
        bars |= compare(report, options)
    report.picture = chart.bars(
        "whole calls", "ms", {name: seconds * 1e3 for name, seconds in bars.items()}
    )
    report.write(options.out)


def run_strong(
    options: Any, grids: dict[int, tuple[int, int]], layer: int, triad_count: int
) -> dict[str, Figures]:
    """One grid on 1, 2, 4 ranks and 1, 2 threads; a gradient with checkpoints; triads."""
    plenty, tight = 1 << 40, TIGHT_FIELDS * options.nodes**2 * 8
    with Jobs() as jobs:

        def begin_job(name: str, ranks: int, threads: int, memory_nbytes: int) -> None:
            jobs.start(name, ranks, bind=threads == 1)
            with jobs.turn(name) as job:
                job.call(
                    "pde_scaling.begin",
                    nodes=[options.nodes] * 2,
                    steps=options.steps,
                    threads=threads,
                    memory_nbytes=memory_nbytes,
                    layer=layer,
                )

        keys = []
        for ranks, threads in [(1, 1), (1, 2), *((ranks, 1) for ranks in grids if ranks > 1)]:
            name = f"{ranks} ranks x {threads} threads"
            begin_job(name, ranks, threads, plenty)
            keys += [f"{name}: forward", f"{name}: gradient"]
        begin_job(f"{ONE}, checkpoints", 1, 1, tight)
        keys += [f"{ONE}, checkpoints: gradient"]
        keys += 3 * [f"{ONE}: triad", f"{TWO}: triad"]

        def block(key: str) -> list[Any]:
            name, kind = key.split(": ")
            with jobs.turn(name) as job:
                given = {"count": triad_count} if kind == "triad" else {}
                return job.call(f"pde_scaling.{kind}", iterations=options.iterations, **given)

        blocks = alternate(keys, options.rounds, block)
    return {key: summarize(blocks[key]) for key in blocks}


def run_weak(options: Any, grids: dict[int, tuple[int, int]], layer: int) -> dict[str, Figures]:
    """A block of one size on each of 1, 2, 4 ranks."""
    with Jobs() as jobs:
        for ranks, dims in grids.items():
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

        keys = [f"{ranks} ranks: {kind}" for ranks in grids for kind in ("forward", "gradient")]
        blocks = alternate(keys, options.rounds, block)
    return {key: summarize(blocks[key]) for key in keys}


def run_poisson(
    report: Report, options: Any, grids: dict[int, tuple[int, int]]
) -> dict[str, float]:
    """One grid on 1, 2, 4 ranks, one job after the other; once each: a solve takes seconds.

    Seconds by name.
    """
    rows, bars = [], {}
    # HYPRE works over MPI, on one rank too.
    env = {"GRADRED_TRANSPORT": "mpi"} if options.preconditioner == "boomeramg" else {}
    given = {"nodes": options.poisson_nodes, "preconditioner": options.preconditioner}
    for ranks in grids:
        try:
            with Jobs() as jobs:
                jobs.start("poisson", ranks, env)
                with jobs.turn("poisson") as job:
                    job.call("pde_scaling.begin_poisson", timeout_s=300.0, **given)
                    blocks = {
                        kind: job.call(f"pde_scaling.{kind}", timeout_s=300.0, iterations=1)
                        for kind in ("solve", "solve_gradient")
                    }
        except JobError as error:
            cause = next((line for line in str(error).splitlines() if "HYPRE" in line), None)
            if cause is None:
                raise
            report.note(f"Poisson on {ranks} ranks left out: {cause}")
            break
        for kind, block in blocks.items():
            figures = summarize([block])
            name = f"Poisson, {ranks} ranks: {kind}"
            bars[name] = figures.median_s
            report.rows.append(
                {
                    "scaling": "poisson",
                    "name": name,
                    **given,
                    "published_s_one_core": PUBLISHED_POISSON_S,
                    **vars(figures),
                }
            )
            rows.append([name, time_text(figures.median_s)])
    head = [f"{options.poisson_nodes} x {options.poisson_nodes} nodes", "time"]
    print("\n" + table(head, rows), flush=True)
    return bars


def show(report: Report, scaling: str, found: dict[str, Figures], options: Any) -> None:
    """Keeps the waves' results, and prints their table."""
    head = ["acoustic wave", "median", "p99", "exchanges", "messages", "bytes", "published"]
    rows = [row(report, scaling, name, figures, options) for name, figures in found.items()]
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
    bandwidth = 24 * triad_count / strong[f"{ONE}: triad"].min_s
    bound = _NODE_NBYTES * options.nodes**2 * options.steps / bandwidth
    note = f"{bound * 1e3:.0f} ms for the counted bytes at {bandwidth / 1e9:.1f} GB/s"
    forward = strong[f"{ONE}: forward"].median_s
    report.targets.append(Target("forward over the roofline's time", forward / bound, 2, "", note))
    gain = strong[f"{ONE}: forward"].min_s / strong[f"{TWO}: forward"].min_s
    # Twice the work on two ranks.
    triad_gain = 2 * strong[f"{ONE}: triad"].min_s / strong[f"{TWO}: triad"].min_s
    note = f"gains {gain:.2f} and {triad_gain:.2f}, of the fastest"
    report.targets.append(
        Target(
            "triad's gain from 1 to 2 cores over the wave's", triad_gain / gain, 1 / 0.9, "", note
        )
    )
    plain = strong[f"{ONE}: gradient"].median_s
    checkpoints = strong[f"{ONE}, checkpoints: gradient"].median_s
    note = f"in the memory of {TIGHT_FIELDS} fields"
    report.targets.append(
        Target("gradient with checkpoints over plain", checkpoints / plain, 1.5, "", note)
    )


def compare(report: Report, options: Any) -> dict[str, float]:
    """Devito and this in turn, on one core, each without and with an absorbing edge.

    Seconds by name.
    """
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
    bars = {}
    for name in ours:
        mine, other = min(ours[name]), min(theirs[name])
        report.rows.append({"peer": "Devito", "name": name, "ours_s": mine, "theirs_s": other})
        note = f"{time_text(mine)} and {time_text(other)}"
        report.targets.append(Target(f"forward {name} over Devito's", mine / other, 1.0, "", note))
        bars |= {f"{name}: gradred": mine, f"{name}: Devito": other}
    return bars


if __name__ == "__main__":
    main()
