"""Acoustic full-waveform inversion: a speed c(x, y) given by a network, found from seismograms.

    gradred run -np 2 python acoustic_fwi.py --out out
    gradred run -np 4 python acoustic_fwi.py --out out --ranks-per-shot 2

The grid is split over the ranks of a shot, and the shots over groups of such ranks: each rank's
gradient is its part of that of one sum, whatever it comes from. Observations come from a grid that
is twice as fine, with noise.
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
from gradred.pde import AcousticWave, Grid

SIDE = 1.0  # of the square
SPEED, SPAN = 1.0, 0.4  # of the network's field
FASTEST = SPEED + SPAN


def true_speed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A fast and a slow lens over a layered background."""
    speed = SPEED + 0.05 * np.tanh(20 * (x - 0.55))
    speed = speed + 0.22 * np.exp(-((x - 0.40) ** 2 + (y - 0.36) ** 2) / 0.012)
    return speed - 0.18 * np.exp(-((x - 0.58) ** 2 + (y - 0.66) ** 2) / 0.010)


class Acquisition:
    """Sources and receivers around the square, on a grid of ``nodes`` or a finer one."""

    def __init__(self, args: argparse.Namespace, context: Context, finer: int = 1) -> None:
        nodes = args.nodes
        self.grid = Grid(
            ((nodes - 1) * finer + 1,) * 2, context, spacing=SIDE / (nodes - 1) / finer
        )
        self.spacing = self.grid.spacing[0]
        self.layer = max(4, nodes // 8) * finer
        self.dt = 0.6 * self.spacing / FASTEST
        self.steps = round(args.seconds / (0.6 * SIDE / (nodes - 1) / FASTEST)) * finer
        first, last = nodes // 8 + 2, nodes - nodes // 8 - 3
        along = np.linspace(first, last, args.shots // 2 + args.shots % 2).round().astype(int)
        self.shots = [(first * finer, int(j) * finer) for j in along]
        self.shots += [(last * finer, int(j) * finer) for j in along[: args.shots // 2]]
        ring = [(first + 1, j) for j in range(first, last, 2)]
        ring += [(last - 1, j) for j in range(first, last, 2)]
        ring += [(i, first + 1) for i in range(first + 2, last - 2, 2)]
        ring += [(i, last - 1) for i in range(first + 2, last - 2, 2)]
        self.receivers = [(i * finer, j * finer) for i, j in ring]
        # A point source of one strength, whatever the spacing; eighteen nodes a wavelength.
        times = self.dt * np.arange(self.steps)
        frequency = SPEED / (18 * SIDE / (nodes - 1))
        phase = (np.pi * frequency * (times - 1.2 / frequency)) ** 2
        self.signal = ((1 - 2 * phase) * np.exp(-phase) / self.spacing**2)[:, None]

    def wave(self, shot: int, threads: int) -> AcousticWave:
        return AcousticWave(
            self.grid,
            dt=self.dt,
            steps=self.steps,
            sources=[self.shots[shot]],
            receivers=self.receivers,
            layer=self.layer,
            layer_speed=SPEED,
            threads=threads,
        )


def observe(args: argparse.Namespace, context: Context, shots: list[int]) -> list[np.ndarray]:
    """Seismograms [steps, receivers] of the own receivers, from the finer grid. Collective."""
    fine = Acquisition(args, context, finer=2)
    speed = true_speed(*fine.grid.coordinates())
    rng = np.random.default_rng([args.seed, gradred.rank(), 1])
    observed = []
    for shot in shots:
        wave = fine.wave(shot, args.threads)
        own = np.array(wave.owned(fine.receivers))
        # Coarse step n ends at the time of fine step 2 n + 1.
        records = wave(speed, fine.signal).numpy()[1::2]
        noise = args.noise * records[:, own].std() if own.any() else 0.0
        observed.append((records + noise * rng.standard_normal(records.shape)) * own)
    return observed


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__.split("\n", 1)[0], iterations=100)
    parser.add_argument("--shots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.8, help="of the seismograms")
    parser.add_argument("--ranks-per-shot", type=int, help="ranks that share a grid; default: all")
    args = parser.parse_args(argv)
    gradred.init()
    size = gradred.size()
    together = args.ranks_per_shot or size
    if size % together:
        sys.exit(f"--ranks-per-shot {together} does not divide the {size} ranks")
    groups = [list(range(first, first + together)) for first in range(0, size, together)]
    context = Context(groups, dims=(together, 1), name="shot")
    group = gradred.rank() // together
    shots = list(range(group, args.shots, len(groups)))
    args.out.mkdir(parents=True, exist_ok=True)

    # A receiver belongs to one block of the fine grid and one of the coarse: the observations of
    # the ranks of a shot are summed, and each takes the misfit of its own.
    coarse = Acquisition(args, context)
    everywhere = [
        np.asarray(common.sum_over(context, records)) for records in observe(args, context, shots)
    ]
    waves = [coarse.wave(shot, args.threads) for shot in shots]
    own = np.array(coarse.wave(0, 1).owned(coarse.receivers), dtype=np.float64)
    power = gradred.allreduce(
        np.float64(sum(np.sum((r * own) ** 2) for r in everywhere)), op=gradred.Sum, name="power"
    )
    network = common.FieldNetwork(SPEED, SPAN, args.seed)
    block = coarse.grid.block_shape
    points = tf.constant(np.stack([c.reshape(-1) for c in coarse.grid.coordinates()], axis=1))
    signal = tf.constant(coarse.signal)
    observed = [tf.constant(records) for records in everywhere]

    @tf.function
    def share():
        """This rank's part of the misfit of all shots, and its gradients."""
        with tf.GradientTape() as tape:
            speed = tf.reshape(network(points), block)
            misfit = tf.zeros([], tf.float64)
            for wave, records in zip(waves, observed, strict=True):
                misfit += tf.reduce_sum(tf.square((wave(speed, signal) - records) * own))
            misfit = context.end(misfit / power)
        return misfit, tape.gradient(misfit, network.trainable_variables)

    common.invert(
        args,
        "speed of sound",
        coarse.grid,
        network,
        share,
        true_speed,
        {"ranks_per_shot": together, "steps": coarse.steps, "shots": args.shots},
        inside=(slice(coarse.layer, -coarse.layer),) * 2,
    )
    gradred.shutdown()


if __name__ == "__main__":
    try:
        main()
    except gradred.errors.Error as error:
        sys.exit(f"acoustic_fwi.py: {type(error).__name__}: {error}")
