"""Train the fully convolutional DenseNet on diffraction patterns with Keras' ``fit``.

    gradred run -np 2 python train.py --data data --out out

Rank 0 shows progress and writes ``out/reconstruction.png``, ``out/results.json`` and, after each
epoch, ``out/checkpoint.npz``.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
from dataset import DataError
from progress import Progress
from report import CommunicationMeter, report

import gradred
import gradred.keras as hvd
import keras


class ShowProgress(keras.callbacks.Callback):
    """On rank 0: a bar for each epoch with loss and images a second of all ranks."""

    def __init__(self, steps: int, images_per_step: int) -> None:
        super().__init__()
        self.steps, self.images_per_step = steps, images_per_step
        self.seconds, self.images = 0.0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.bar = Progress(f"epoch {epoch + 1}", self.steps, show=hvd.rank() == 0)
        self.step_started = time.perf_counter()
        self.first = True

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        if not self.first:  # the first step of an epoch may trace the graph
            self.seconds += now - self.step_started
            self.images += self.images_per_step
        self.first, self.step_started = False, now
        rate = f"{self.images / self.seconds:.1f} images/s" if self.seconds else ""
        self.bar.step(note=f"loss {logs['loss']:.4f}  {rate}")

    def on_epoch_end(self, epoch, logs=None):
        self.bar.close()

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0


class Checkpoint(keras.callbacks.Callback):
    """On rank 0: the state after each epoch."""

    def __init__(self, path) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            common.save_checkpoint(self.path, self.model, self.model.optimizer, epoch + 1)


def main(argv: list[str] | None = None) -> None:
    args = common.parse(argv, __doc__.split("\n", 1)[0])
    hvd.init()
    data = common.load(args.data, hvd.rank(), hvd.size())
    steps = max(len(data.train) // args.batch, 1)
    net, optimizer = common.build(args, steps)
    args.out.mkdir(parents=True, exist_ok=True)
    first = 0
    if args.resume:
        first = common.load_checkpoint(args.out / "checkpoint.npz", net, optimizer)

    optimizer = hvd.DistributedOptimizer(
        optimizer, compression=common.WIRES[args.wire], groups=args.groups
    )
    net.compile(optimizer=optimizer, loss="mse")
    progress = ShowProgress(steps, args.batch * hvd.size())
    meter = CommunicationMeter()
    meter.start()
    started = time.perf_counter()
    history = net.fit(
        data.train.patterns,
        data.train.potential,
        batch_size=args.batch,
        epochs=args.epochs,
        initial_epoch=first,
        steps_per_epoch=steps,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            progress,
            Checkpoint(args.out / "checkpoint.npz"),
        ],
    )
    report(
        args,
        net,
        data,
        {
            "loss": history.history.get("loss", []),
            "epochs": args.epochs,
            "images_per_second": progress.images_per_second,
            "train_seconds": time.perf_counter() - started,
            "communication": meter.stop(steps * (args.epochs - first)),
        },
    )
    hvd.shutdown()


if __name__ == "__main__":
    try:
        main()
    except (DataError, OSError, gradred.errors.Error) as error:
        sys.exit(f"train.py: {type(error).__name__}: {error}")
