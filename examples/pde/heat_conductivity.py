"""Inversion for the heat conductivity k(x, y), given by a network, from sensors' temperatures.

    gradred run -np 2 python heat_conductivity.py --out out

A plate whose edges are kept at 0 is heated at a few places, one after the other; sensors record the
temperature. The plate is split over all ranks. Observations come from a grid that is twice as fine,
with noise.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
import numpy as np

import gradred
import tensorflow as tf
from gradred.diff import Context
from gradred.pde import Grid, Heat

CONDUCTIVITY, SPAN = 1.0, 0.6  # of the network's field
LARGEST = CONDUCTIVITY + SPAN
SECONDS = 0.12


def true_conductivity(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A block that conducts well and a round one that conducts badly."""
    block = 1 / (1 + np.exp(-60 * (0.13 - np.maximum(abs(x - 0.33), abs(y - 0.62)))))
    hole = np.exp(-((x - 0.66) ** 2 + (y - 0.35) ** 2) / 0.02)
    return CONDUCTIVITY + 0.45 * block - 0.4 * hole


class Plate:
    """The unit square with ``nodes`` nodes inside along each side, or ``finer`` times as fine."""

    def __init__(self, args: argparse.Namespace, context: Context, finer: int = 1) -> None:
        spacing = 1 / (args.nodes + 1) / finer
        nodes = (args.nodes + 1) * finer - 1
        self.grid = Grid((nodes, nodes), context, spacing=spacing, origin=spacing)
        coarse_steps = round(SECONDS * 4 * LARGEST * (args.nodes + 1) ** 2 / 0.9)
        self.steps = coarse_steps * finer**2
        self.dt = SECONDS / self.steps

        def node(x: float, y: float) -> tuple[int, int]:
            i, j = (round(c * (args.nodes + 1)) * finer - 1 for c in (x, y))
            return i, j

        heaters = [(x, y) for x in (0.18, 0.5, 0.82) for y in (0.18, 0.5, 0.82)]
        sensors = np.linspace(0.1, 0.9, 6)  # away from the heaters
        self.problem = Heat(
            self.grid,
            dt=self.dt,
            steps=self.steps,
            sources=[node(*place) for place in heaters],
            receivers=[node(x, y) for x in sensors for y in sensors],
            threads=args.threads,
        )
        # One heater after the other; the heat of each is one, whatever the spacing.
        share = np.arange(self.steps)[:, None] * len(heaters) // self.steps
        self.signals = (share == np.arange(len(heaters))) / spacing**2
        self.own = np.array(self.problem.owned(self.problem.receivers), dtype=np.float64)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__.split("\n", 1)[0], iterations=120)
    parser.set_defaults(nodes=39)
    args = parser.parse_args(argv)
    gradred.init()
    context = Context(dims=(gradred.size(), 1), name="plate")
    args.out.mkdir(parents=True, exist_ok=True)
    fine = Plate(args, context, finer=2)
    records = fine.problem(true_conductivity(*fine.grid.coordinates()), fine.signals).numpy()
    # Coarse step n ends at the time of fine step 4 n + 3.
    whole = common.sum_over(context, records[3::4])
    rng = np.random.default_rng([args.seed, 1])
    observed = tf.constant(whole + args.noise * whole.std() * rng.standard_normal(whole.shape))
    power = float(np.sum(whole**2))

    plate = Plate(args, context)
    network = common.FieldNetwork(CONDUCTIVITY, SPAN, args.seed)
    block = plate.grid.block_shape
    points = tf.constant(np.stack([c.reshape(-1) for c in plate.grid.coordinates()], axis=1))
    signals = tf.constant(plate.signals)

    @tf.function
    def share():
        """This rank's part of the misfit, and its gradients."""
        with tf.GradientTape() as tape:
            conductivity = tf.reshape(network(points), block)
            difference = (plate.problem(conductivity, signals) - observed) * plate.own
            misfit = context.end(tf.reduce_sum(tf.square(difference)) / power)
        return misfit, tape.gradient(misfit, network.trainable_variables)

    common.invert(
        args,
        "heat conductivity",
        plate.grid,
        network,
        share,
        true_conductivity,
        {"steps": plate.steps},
    )
    gradred.shutdown()


if __name__ == "__main__":
    try:
        main()
    except gradred.errors.Error as error:
        sys.exit(f"heat_conductivity.py: {type(error).__name__}: {error}")
