"""The same training as train.py with a loop of one's own and DistributedGradientTape.

gradred run -np 2 python train_loop.py --data data --out out
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
import numpy as np
from dataset import DataError
from progress import Progress
from report import CommunicationMeter, report

import gradred
import gradred.tensorflow as hvd
import tensorflow as tf


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
    else:
        hvd.broadcast_variables(net.variables, root_rank=0)
    scaled = args.precision == "float16"

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x, training=True) - y))
            target = scale_loss(optimizer, loss) if scaled else loss
        tape = hvd.DistributedGradientTape(
            tape, compression=common.WIRES[args.wire], groups=args.groups
        )
        gradients = tape.gradient(target, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    rng = np.random.default_rng([args.seed, hvd.rank()])
    history, seconds, images = [], 0.0, 0
    meter = CommunicationMeter()
    meter.start()
    started = time.perf_counter()
    for epoch in range(first, args.epochs):
        bar = Progress(f"epoch {epoch + 1}", steps, show=hvd.rank() == 0)
        losses = []
        order = rng.permutation(len(data.train))[: steps * args.batch]
        for k, batch in enumerate(np.split(order, steps)):
            begun = time.perf_counter()
            x = data.train.patterns[batch].astype(np.float32)
            losses.append(float(step(x, data.train.potential[batch])))
            if k > 0:  # the first step may trace the graph
                seconds += time.perf_counter() - begun
                images += len(batch) * hvd.size()
            bar.step(note=f"loss {losses[-1]:.4f}")
        bar.close()
        history.append(float(gradred.allreduce(np.float64(np.mean(losses)), name="loss")))
        if hvd.rank() == 0:
            common.save_checkpoint(args.out / "checkpoint.npz", net, optimizer, epoch + 1)
    report(
        args,
        net,
        data,
        {
            "loss": history,
            "epochs": args.epochs,
            "images_per_second": images / seconds if seconds else 0.0,
            "train_seconds": time.perf_counter() - started,
            "communication": meter.stop(steps * (args.epochs - first)),
        },
    )
    hvd.shutdown()


def scale_loss(optimizer, loss):
    """Keras 3 and 2 name it differently."""
    return (getattr(optimizer, "scale_loss", None) or optimizer.get_scaled_loss)(loss)


if __name__ == "__main__":
    try:
        main()
    except (DataError, OSError, gradred.errors.Error) as error:
        sys.exit(f"train_loop.py: {type(error).__name__}: {error}")
