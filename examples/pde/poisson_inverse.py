"""Inversion for the coefficient k(x, y) of Poisson's equation, given by a network.

    gradred run -np 2 python poisson_inverse.py --out out

- div(k grad u) = f on the unit square, u = 0 on its edge, for a few sources f one after the other.
u is observed at all nodes, with noise, and comes from a grid that is twice as fine. The square is
split over all ranks; each solve and its adjoint run on all of them.
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
from gradred.pde import Grid, Poisson

COEFFICIENT, SPAN = 1.0, 0.6  # of the network's field
SOURCES = 3


def true_coefficient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A ridge along a diagonal and a round hollow."""
    ridge = np.exp(-((x - 0.8 * y - 0.15) ** 2) / 0.012)
    hollow = np.exp(-((x - 0.3) ** 2 + (y - 0.68) ** 2) / 0.02)
    return COEFFICIENT + 0.4 * ridge - 0.4 * hollow


def sources(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Waves of the lowest frequencies, [SOURCES, ...]."""
    waves = [(1, 1), (2, 1), (1, 2)][:SOURCES]
    return np.stack([20 * np.sin(np.pi * i * x) * np.sin(np.pi * j * y) for i, j in waves])


class Square:
    """With ``nodes`` nodes inside along each side, or ``finer`` times as fine."""

    def __init__(self, args: argparse.Namespace, context: Context, finer: int = 1) -> None:
        spacing = 1 / (args.nodes + 1) / finer
        nodes = (args.nodes + 1) * finer - 1
        self.grid = Grid((nodes, nodes), context, spacing=spacing, origin=spacing)
        self.problem = Poisson(self.grid, args.method)
        self.sources = tf.constant(sources(*self.grid.coordinates()))
        self.options = {"rtol": args.rtol, "preconditioner": args.preconditioner}

    def solve(self, coefficient: tf.Tensor) -> list[tf.Tensor]:
        return [
            self.problem(coefficient, source, **self.options) for source in tf.unstack(self.sources)
        ]


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__.split("\n", 1)[0], iterations=60)
    parser.set_defaults(nodes=39)
    parser.add_argument("--method", choices=["differences", "elements"], default="elements")
    parser.add_argument("--preconditioner", choices=["jacobi", "boomeramg"], default="jacobi")
    parser.add_argument("--rtol", type=float, default=1e-10, help="of the solves")
    args = parser.parse_args(argv)
    gradred.init()
    context = Context(dims=(gradred.size(), 1), name="square")
    args.out.mkdir(parents=True, exist_ok=True)
    fine = Square(args, context, finer=2)
    records = fine.solve(tf.constant(true_coefficient(*fine.problem.points.T)))
    whole = np.stack([fine.grid.whole(u.numpy())[1::2, 1::2] for u in records])
    rng = np.random.default_rng([args.seed, 1])
    noisy = whole + args.noise * whole.std() * rng.standard_normal(whole.shape)
    power = float(np.sum(whole**2))

    square = Square(args, context)
    observed = [tf.constant(square.grid.block(u)) for u in noisy]
    network = common.FieldNetwork(COEFFICIENT, SPAN, args.seed)
    points = tf.constant(square.problem.points)

    @tf.function
    def share():
        """This rank's part of the misfit, and its gradients."""
        with tf.GradientTape() as tape:
            found = square.solve(network(points))
            misfit = tf.add_n(
                [tf.reduce_sum((u - o) ** 2) for u, o in zip(found, observed, strict=True)]
            )
            misfit = context.end(misfit / power)
        return misfit, tape.gradient(misfit, network.trainable_variables)

    common.invert(
        args,
        "coefficient of Poisson's equation",
        square.grid,
        network,
        share,
        true_coefficient,
        {"method": args.method},
    )
    gradred.shutdown()


if __name__ == "__main__":
    try:
        main()
    except gradred.errors.Error as error:
        sys.exit(f"poisson_inverse.py: {type(error).__name__}: {error}")
