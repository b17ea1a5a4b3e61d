"""Devito's acoustic propagation: the peer of pde_scaling.py, run by a Python that has Devito.

python devito_wave.py NODES STEPS

Prints the seconds of the fastest of some runs on one core, float64, second order in space and time,
without and with damping at the edges.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["DEVITO_LOGGING"] = "ERROR"
os.environ["DEVITO_LANGUAGE"] = "C"

import numpy as np
from devito import Eq, Function, Grid, Operator, SparseTimeFunction, TimeFunction, solve


def operator(nodes: int, steps: int, damped: bool) -> Operator:
    grid = Grid(shape=(nodes, nodes), extent=(nodes - 1, nodes - 1), dtype=np.float64)
    u = TimeFunction(name="u", grid=grid, time_order=2, space_order=2)
    m = Function(name="m", grid=grid)
    m.data[:] = 1.0
    equation = m * u.dt2 - u.laplace
    if damped:
        damp = Function(name="damp", grid=grid)
        damp.data[:] = 0.0
        equation = equation + damp * u.dt
    points = {"grid": grid, "npoint": 1, "nt": steps + 2}
    source = SparseTimeFunction(name="source", **points)
    source.coordinates.data[:] = nodes // 2
    source.data[:] = 1.0
    receiver = SparseTimeFunction(name="receiver", **points)
    receiver.coordinates.data[:] = nodes // 4
    dt = grid.stepping_dim.spacing
    operations = [Eq(u.forward, solve(equation, u.forward))]
    operations += source.inject(field=u.forward, expr=source * dt**2 / m)
    operations += receiver.interpolate(expr=u)
    return Operator(operations)


def main() -> None:
    nodes, steps = map(int, sys.argv[1:])
    fastest = []
    for damped in (False, True):
        run = operator(nodes, steps, damped)
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            run.apply(time_m=1, time_M=steps, dt=0.5)
            times.append(time.perf_counter() - begun)
        fastest.append(min(times[1:]))
    print(json.dumps(fastest))


if __name__ == "__main__":
    main()
