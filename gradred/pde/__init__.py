"""Partial differential equations on grids over the ranks, trained together with networks."""

from __future__ import annotations

from gradred.pde.flat import FlatVariables
from gradred.pde.grids import Grid, blocks_of
from gradred.pde.lbfgs import LbfgsState, minimize_lbfgs
from gradred.pde.poisson import Poisson
from gradred.pde.propagation import AcousticWave, Heat, Traffic

__all__ = [
    "AcousticWave",
    "FlatVariables",
    "Grid",
    "Heat",
    "LbfgsState",
    "Poisson",
    "Traffic",
    "blocks_of",
    "minimize_lbfgs",
]
