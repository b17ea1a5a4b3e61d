"""What rank 0 prints, draws and writes after training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
import numpy as np

import gradred
import keras


def report(
    args: argparse.Namespace, net: keras.Model, data: common.Data, run: dict[str, Any]
) -> None:
    """Test error, speed, waiting and pictures. Collective; rank 0 prints and writes."""
    error = common.test_error(net, data, args.batch)
    mean_error = common.baseline(data)
    if gradred.rank() != 0:
        return
    flop = common.flop_per_sample(net)
    communication = run["communication"]
    results = {
        "ranks": gradred.size(),
        "parameters": net.count_params(),
        "precision": args.precision,
        "wire": args.wire,
        "batch_per_rank": args.batch,
        "train_samples": len(data.train) * gradred.size(),
        "test_samples": len(data.test) * gradred.size(),
        **{k: v for k, v in run.items() if k != "communication"},
        **communication,
        "flop_per_sample": flop,
        "sustained_flop_per_second": flop * run["images_per_second"],
        "test_error": error,
        "predict_the_mean_error": mean_error,
        "test_error_ratio": error / mean_error,
    }
    picture = args.out / "reconstruction.png"
    draw(picture, net, data)
    common.write_results(args.out / "results.json", results)
    print(f"network: {net.count_params():,} parameters, {flop / 1e9:.2f} GFLOP a sample")
    print(
        f"speed: {run['images_per_second']:.1f} images/s on {gradred.size()} ranks, "
        f"{results['sustained_flop_per_second'] / 1e9:.1f} GFLOP/s sustained"
    )
    print(f"communication: {communication['wait_per_step_ms']:.2f} ms of waiting a step")
    print(
        f"test error: {error:.4f}, {error / mean_error:.2f} of predicting the mean "
        f"({mean_error:.4f})"
    )
    print(f"pictures: {picture}\nresults: {args.out / 'results.json'}")


def draw(path: Path, net: keras.Model, data: common.Data, samples: int = 4) -> None:
    """One row a test sample: four of its patterns, the truth, the reconstruction, on one scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n = min(samples, len(data.test))
    predicted = net.predict(data.test.patterns[:n], batch_size=n, verbose=0)
    figure, axes = plt.subplots(n, 6, figsize=(12, 2.1 * n), squeeze=False)
    for row in range(n):
        for column, position in enumerate((0, 21, 42, 63)):
            axes[row, column].imshow(
                data.test.patterns[row, position].astype(np.float32), cmap="inferno"
            )
        truth = data.test.potential[row]
        for column, image in ((4, truth), (5, predicted[row])):
            axes[row, column].imshow(image, vmin=truth.min(), vmax=truth.max(), cmap="viridis")
    titles = [f"pattern {p}" for p in (0, 21, 42, 63)] + ["potential", "reconstruction"]
    for column, title in enumerate(titles):
        axes[0, column].set_title(title)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


class CommunicationMeter:
    """What communication did between ``start`` and ``stop``, on this rank."""

    def start(self) -> None:
        self.before = gradred.metrics()

    def stop(self, steps: int) -> dict[str, float]:
        now = gradred.metrics()
        grown = {
            name: getattr(now, name) - getattr(self.before, name)
            for name in ("wait_s", "communication_s", "rounds", "groups", "bytes")
        }
        wait = grown.pop("wait_s")
        return {
            "wait_per_step_ms": 1e3 * wait / max(steps, 1),
            **grown,
            "non_finite": now.non_finite,
            "saturated": now.saturated,
        }
