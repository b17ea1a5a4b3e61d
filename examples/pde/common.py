"""What the inversions share: the unknown field as a network, optimizers, pictures, results."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "diffraction"))  # for progress.py
from progress import Progress

import gradred
import gradred.tensorflow as hvd
import tensorflow as tf
from gradred import diff
from gradred.diff import Context
from gradred.pde import FlatVariables, Grid, LbfgsState, minimize_lbfgs


def parser(description: str, iterations: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    add = made.add_argument
    add("--out", type=Path, default=Path("out"), help="folder of the picture and the results")
    add("--nodes", type=int, default=80, help="of the grid, along each dimension")
    add("--iterations", type=int, default=iterations)
    add("--optimizer", choices=["lbfgs", "adam"], default="lbfgs")
    add("--learning-rate", type=float, default=3e-3, help="of Adam")
    add("--noise", type=float, default=0.01, help="of the observations, a part of their size")
    add("--threads", type=int, default=1, help="of a rank, for the native loops")
    add("--seed", type=int, default=0)
    add("--resume", action="store_true", help="go on from state.npz, on any number of ranks")
    return made


class FieldNetwork(tf.Module):
    """A field on the plane: ``middle + range * tanh(network(x, y))``, float64.

    Coordinates between 0 and 1, [n, 2] -> [n]. Two hidden layers behind sines and cosines of the
    first frequencies, so that details are learnt as fast as the background.
    """

    def __init__(self, middle: float, span: float, seed: int, width: int = 32) -> None:
        super().__init__()
        self.middle, self.span = middle, span
        frequencies = [(i, j) for i in range(4) for j in range(4) if i or j]
        self._frequencies = tf.constant(np.pi * np.array(frequencies).T, dtype=tf.float64)
        rng = np.random.default_rng(seed)
        sizes = [2 * len(frequencies), width, width, 1]
        self.layers = [
            (
                tf.Variable(rng.standard_normal((n, m)) / np.sqrt(n) * (0.1 if m == 1 else 1.0)),
                tf.Variable(np.zeros(m)),
            )
            for n, m in itertools.pairwise(sizes)
        ]

    def __call__(self, coordinates: tf.Tensor) -> tf.Tensor:
        phases = coordinates @ self._frequencies
        x = tf.concat([tf.sin(phases), tf.cos(phases)], axis=1)
        for weights, bias in self.layers[:-1]:
            x = tf.tanh(x @ weights + bias)
        weights, bias = self.layers[-1]
        return self.middle + self.span * tf.tanh((x @ weights + bias)[:, 0])


def fit(
    args: argparse.Namespace,
    network: FieldNetwork,
    share: Callable[[], tuple[tf.Tensor, Sequence[tf.Tensor]]],
) -> list[float]:
    """Minimizes the sum over the ranks of ``share``; returns the values by iteration. Collective.

    share: this rank's part of the misfit, and its gradients by the network's variables.
    """
    variables = network.trainable_variables
    flat = FlatVariables(variables)
    values: list[float] = []
    bar = Progress("inversion", args.iterations, show=gradred.rank() == 0)
    path = args.out / "state.npz"

    def note(value: float) -> None:
        values.append(value)
        bar.step(note=f"misfit {value:.3e}")

    if args.optimizer == "lbfgs":

        def whole(x: np.ndarray) -> tuple[float, np.ndarray]:
            flat.set(x)
            value, gradients = share()
            return float(value), flat.flatten(gradients)

        def each(state: LbfgsState) -> None:
            note(state.value)
            if gradred.rank() == 0 and state.iterations % 10 == 0:
                state.save(path)

        start = LbfgsState.load(path) if args.resume else flat.get()
        state = minimize_lbfgs(whole, start, iterations=args.iterations, callback=each)
        flat.set(state.x)
        if gradred.rank() == 0:
            state.save(path)
    else:
        # The ranks' gradients are those of parts of one sum.
        import keras

        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.learning_rate), op=hvd.Sum)
        if args.resume:
            flat.set(LbfgsState.load(path).x)
        hvd.broadcast_variables(variables, root_rank=0)
        for _ in range(args.iterations):
            value, gradients = share()
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            note(float(gradred.allreduce(np.float64(value), op=gradred.Sum, name="misfit")))
        if gradred.rank() == 0:
            LbfgsState(flat.get()).save(path)
    bar.close()
    return values


def sum_over(context: Context, array: np.ndarray) -> np.ndarray:
    """The sum of the arrays of a context's ranks. Collective over the context."""
    return np.asarray(diff.allreduce(array, context, op="sum"))


def relative_error(field: np.ndarray, truth: np.ndarray) -> float:
    """Of the deviation from the truth, in the root mean square, against the truth's variation."""
    return float(np.linalg.norm(field - truth) / np.linalg.norm(truth - truth.mean()))


def invert(
    args: argparse.Namespace,
    title: str,
    grid: Grid,
    network: FieldNetwork,
    share: Callable[[], tuple[tf.Tensor, Sequence[tf.Tensor]]],
    truth: Callable[[np.ndarray, np.ndarray], np.ndarray],
    settings: dict[str, Any],
    inside: tuple[slice, ...] = (slice(None), slice(None)),
) -> None:
    """Fits the network; rank 0 draws and writes what was found. Collective.

    share: see ``fit``. truth: the field at coordinates x, y. settings: go into the results. inside:
    the part of the grid where the field is compared with the truth.
    """
    started = time.perf_counter()
    values = fit(args, network, share)
    seconds = time.perf_counter() - started
    nodes = np.stack([c.reshape(-1) for c in grid.coordinates()], axis=1)
    block = tf.reshape(network(tf.constant(nodes)), grid.block_shape).numpy()
    found = grid.whole(block)[inside]
    true = grid.whole(truth(*grid.coordinates()))[inside]
    if gradred.rank() != 0:
        return
    results = {
        "ranks": gradred.size(),
        "nodes": args.nodes,
        "optimizer": args.optimizer,
        **settings,
        "misfit": values,
        "seconds": seconds,
        "error_of_start": relative_error(np.full_like(true, network.middle), true),
        "error": relative_error(found, true),
    }
    write_results(args.out / "results.json", results)
    fields = {"truth": true, "recovered": found}
    picture = draw(args.out / "recovered.png", title, fields, values)
    for name, value in results.items():
        if not isinstance(value, list):
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    print(f"picture: {picture}")


def write_results(path: Path, results: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(part, path)


def draw(path: Path, title: str, fields: dict[str, np.ndarray], values: Sequence[float]) -> str:
    """Writes the picture; returns its path, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "none, matplotlib is not installed"

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(fields) + 1, figsize=(4 * len(fields) + 4, 3.4))
    low = min(field.min() for field in fields.values())
    high = max(field.max() for field in fields.values())
    for axis, (name, field) in zip(axes, fields.items(), strict=False):
        image = axis.imshow(field, vmin=low, vmax=high, cmap="viridis")
        axis.set_title(name)
        axis.set_axis_off()
        figure.colorbar(image, ax=axis, shrink=0.8)
    axes[-1].semilogy(range(1, len(values) + 1), values)
    axes[-1].set_xlabel("iteration")
    axes[-1].set_title("misfit")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return str(path)
