"""What train.py and train_loop.py share: arguments, data, checkpoints, evaluation."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import model as densenet
import numpy as np
from dataset import DataError, load_split

import gradred
import keras
from gradred.tensorflow import Compression

PRECISIONS = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
WIRES = {
    "none": Compression.none,
    "float16": Compression.fp16,
    "bfloat16": Compression.bf16,
}


def parse(argv: list[str] | None, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="folder of generate.py's shards")
    add("--out", type=Path, default=Path("out"), help="folder of checkpoint, picture and results")
    add("--preset", choices=sorted(densenet.PRESETS), default="default")
    add("--growth", type=int, help="channels that a layer of a dense block adds")
    add("--kernel", type=int, help="size of the convolutions in the blocks")
    add("--blocks", help="layers of each dense block, such as 2,2")
    add("--epochs", type=int, default=6, help="epochs in all, those before a resume included")
    add("--batch", type=int, default=4, help="samples a step and rank")
    add("--lr", type=float, default=1e-3, help="learning rate of one rank; scaled by the ranks")
    add(
        "--warmup",
        type=float,
        default=1.0,
        help="epochs over which the learning rate grows",
    )
    add("--precision", choices=sorted(PRECISIONS), default="float32", help="of the computation")
    add("--wire", choices=sorted(WIRES), default="none", help="dtype in which gradients travel")
    add("--groups", help="a number of groups, a size such as 4MiB, or layer")
    add(
        "--resume",
        action="store_true",
        help="go on from --out/checkpoint.npz",
    )
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("epochs", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is at least 1, got {getattr(args, name)}")
    widths = densenet.PRESETS[args.preset]
    try:
        blocks = tuple(int(n) for n in args.blocks.split(",")) if args.blocks else widths.blocks
        args.groups = gradred.grouping.parse(args.groups) if args.groups else None
    except ValueError as error:  # of both: InvalidArgument is a ValueError
        parser.error(str(error))
    args.widths = replace(
        widths,
        growth=args.growth or widths.growth,
        kernel=args.kernel or widths.kernel,
        blocks=blocks,
    )
    return args


@dataclass
class Split:
    """One rank's samples, standardised.

    patterns: [n, 64, 64, 64] float16. potential: [n, 64, 64] float32.
    """

    patterns: np.ndarray
    potential: np.ndarray

    def __len__(self) -> int:
        return len(self.patterns)


@dataclass
class Data:
    train: Split
    test: Split
    mean_image: np.ndarray  # of all ranks' training potentials: the prediction to beat


def load(folder: Path, rank: int, size: int) -> Data:
    """This rank's part of both splits, standardised by the statistics of all ranks. Collective."""
    error = None
    try:
        splits = {name: load_split(folder, name, rank, size) for name in ("train", "test")}
    except DataError as caught:
        error = f"rank {rank}: {caught}"
    # All ranks learn of a fault on one, and leave together.
    errors = [e for e in gradred.allgather_object(error) if e]
    if errors:
        raise DataError("; ".join(errors))
    patterns, potential = splits["train"]
    sums = np.array(
        [
            patterns.size,
            patterns.sum(dtype=np.float64),
            np.square(patterns, dtype=np.float32).sum(dtype=np.float64),
            potential.size,
            potential.sum(dtype=np.float64),
            np.square(potential, dtype=np.float64).sum(),
        ]
    )
    n, s, q, m, t, v = gradred.allreduce(sums, op=gradred.Sum, name="statistics")
    x_mean, y_mean = s / n, t / m
    x_std, y_std = np.sqrt(q / n - x_mean**2), np.sqrt(v / m - y_mean**2)

    def standardise(x: np.ndarray, y: np.ndarray) -> Split:
        scaled = ((x.astype(np.float32) - x_mean) / x_std).astype(np.float16)
        return Split(scaled, ((y - y_mean) / y_std).astype(np.float32))

    train, test = standardise(patterns, potential), standardise(*splits["test"])
    mean_image = gradred.allreduce(train.potential.mean(0), name="mean image")
    return Data(train, test, mean_image)


def baseline(data: Data) -> float:
    """Mean squared error of predicting the training mean, on all test samples. Collective."""
    error = np.square(data.test.potential - data.mean_image, dtype=np.float64).mean()
    return float(gradred.allreduce(np.float64(error), name="baseline"))


def test_error(net: keras.Model, data: Data, batch: int) -> float:
    """Mean squared error over all ranks' test samples (equally many on each). Collective."""
    predicted = net.predict(data.test.patterns, batch_size=batch, verbose=0)
    error = np.square(predicted - data.test.potential, dtype=np.float64).mean()
    return float(gradred.allreduce(np.float64(error), name="test error"))


@keras.utils.register_keras_serializable("gradred.examples")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Linear from ``rate`` to ``rate * ranks`` over ``steps`` steps (arXiv:1706.02677)."""

    def __init__(self, rate: float, ranks: int, steps: int) -> None:
        self.rate, self.ranks, self.steps = rate, ranks, max(steps, 1)

    def __call__(self, step: Any) -> Any:
        import tensorflow as tf

        part = tf.minimum(tf.cast(step, tf.float32) / self.steps, 1.0)
        return self.rate * (1.0 + part * (self.ranks - 1))

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate, "ranks": self.ranks, "steps": self.steps}


def build(args: argparse.Namespace, steps_per_epoch: int) -> tuple[keras.Model, Any]:
    """The network and a plain optimizer, float16 with dynamic loss scaling."""
    keras.utils.set_random_seed(args.seed)
    net = densenet.build(args.widths, PRECISIONS[args.precision])
    rate = WarmUp(args.lr, gradred.size(), int(args.warmup * steps_per_epoch))
    optimizer = keras.optimizers.Adam(rate)
    if args.precision == "float16":
        scaled = getattr(keras.optimizers, "LossScaleOptimizer", None)
        optimizer = scaled(optimizer) if scaled else _keras2_loss_scale(optimizer)
    optimizer.build(net.trainable_variables)
    return net, optimizer


def _keras2_loss_scale(optimizer: Any) -> Any:
    return keras.mixed_precision.LossScaleOptimizer(optimizer)


# Checkpoints hold every variable by position, so that they load on any number of ranks.


def _variables(net: keras.Model, optimizer: Any) -> list[Any]:
    own = optimizer.variables
    return [*net.variables, *(own() if callable(own) else own)]


def save_checkpoint(path: Path, net: keras.Model, optimizer: Any, epoch: int) -> None:
    """On rank 0; the file is whole or not there."""
    part = path.with_suffix(".part")
    arrays = {f"v{i}": np.asarray(v) for i, v in enumerate(_variables(net, optimizer))}
    with open(part, "wb") as file:
        np.savez(file, epoch=epoch, **arrays)
    os.replace(part, path)


def load_checkpoint(path: Path, net: keras.Model, optimizer: Any) -> int:
    """Rank 0 reads, all get its variables. Returns the epochs that are done. Collective."""
    from gradred.tensorflow import broadcast_variables

    variables = _variables(net, optimizer)
    error, epoch = None, 0
    if gradred.rank() == 0:
        try:
            with np.load(path) as saved:
                if len(saved.files) - 1 != len(variables):
                    raise ValueError(
                        f"it has {len(saved.files) - 1} variables, this network {len(variables)}"
                    )
                for i, variable in enumerate(variables):
                    variable.assign(saved[f"v{i}"])
                epoch = int(saved["epoch"])
        except Exception as caught:
            error = f"cannot resume from {path}: {caught}"
    error, epoch = gradred.broadcast_object((error, epoch), root_rank=0)
    if error:
        raise DataError(error)
    broadcast_variables(variables, root_rank=0)
    return epoch


def flop_per_sample(net: keras.Model) -> int:
    """Floating-point operations of forward and backward pass for one sample. Local.

    Counted on the network's graph: multiplications and additions of the convolutions, which are
    all but a few per cent. The backward pass of a convolution is two of the same size, one in the
    first layer, whose input needs no gradient.
    """
    forward = []
    for layer in net.layers:
        if isinstance(layer, keras.layers.Conv2DTranspose | keras.layers.Conv2D):
            # A transposed convolution applies its kernel at each point of its input.
            transposed = isinstance(layer, keras.layers.Conv2DTranspose)
            at = layer.input if transposed else layer.output
            points = int(np.prod(at.shape[1:3]))
            forward.append(2 * points * int(np.prod(layer.kernel.shape)))
    return 3 * sum(forward) - forward[0]


def write_results(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps(results, indent=2) + "\n")
