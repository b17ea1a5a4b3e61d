"""Training programs of TensorFlow that run inside the ranks, with gradred, Horovod or neither."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench import native
from bench.measure import engine_threads, loop, me

import tensorflow as tf

__all__ = [
    "begin",
    "build",
    "forget",
    "last_group",
    "network_facts",
    "run",
    "sum_alone",
    "work_units_a_ms",
]

Loss = Callable[[], tf.Tensor]


class Library:
    """What reduces gradients: "gradred", "horovod", or "none" for independent processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        with engine_threads():
            if name == "gradred":
                import gradred.tensorflow as hvd
            elif name == "horovod":
                import horovod.tensorflow as hvd
            else:
                return
            hvd.init()
        self.hvd = hvd

    def tape(self, tape: tf.GradientTape, groups: Any) -> tf.GradientTape:
        """groups: gradred's; Horovod takes a number."""
        if self.name == "gradred":
            return self.hvd.DistributedGradientTape(tape, groups=groups)
        if self.name == "horovod":
            return self.hvd.DistributedGradientTape(tape, num_groups=groups or 0)
        return tape

    def each(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self.name == "none":
            return list(gradients)
        return [self.hvd.allreduce(g, op=self.hvd.Average) for g in gradients]

    def grouped(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self.name == "none":
            return list(gradients)
        return list(self.hvd.grouped_allreduce(list(gradients), op=self.hvd.Average))

    def counters(self) -> dict[str, float]:
        if self.name != "gradred":
            return {}
        metrics = self.hvd.metrics()
        names = "wait_s communication_s groups rounds bytes"
        return {name: float(getattr(metrics, name)) for name in names.split()}

    @property
    def reduces(self) -> bool:
        return self.name != "none" and os.environ.get("GRADRED_NULL") != "1"


_library: Library | None = None
_programs: dict[str, Program] = {}


_numbers = itertools.count()


class Program:
    """One step as a tf.function, and how its results are checked."""

    def __init__(
        self, step: Callable[[], Any], check: Callable[[Any], tuple[int, int]] | None = None
    ) -> None:
        # Functions of one name would share what gradred decides about groups.
        step.__name__ = f"{step.__name__}_{next(_numbers)}"
        self.step = tf.function(step).get_concrete_function()
        self._check = check
        self._last: Any = None

    def release(self) -> None:
        """The results' memory is free for the next step."""
        self._last = None

    def run(self) -> None:
        self._last = self.step()

    def check(self) -> tuple[int, int]:
        assert _library is not None
        if self._check is None or not _library.reduces:
            return 0, 0
        return self._check(self._last)


def begin(library: str) -> None:
    """Starts the library of this rank. Collective."""
    global _library
    _library = Library(library)


def build(key: str, kind: str, **arguments: Any) -> dict[str, Any]:
    """Builds a program of one of the makers below and keeps it under ``key``. Local."""
    maker = {"layers": layers, "gradients": gradients, "network": network}[kind]
    _programs[key] = maker(**arguments)
    return {}


def forget(key: str) -> None:
    del _programs[key]


def run(key: str, iterations: int, warmup: int = 2, together: bool = True) -> dict[str, Any]:
    """Measures a block of steps of a program. Collective. See measure.loop."""
    assert _library is not None
    program = _programs[key]
    counters = _library.counters
    return loop(program.run, iterations, warmup, program.release, program.check, counters, together)


def last_group(nbytes: int) -> int:
    """Bytes of the group that travels last in gradred's plan of gradients of ``nbytes``. Local."""
    from gradred import plan_file
    from gradred._native import core

    plans = [plan for plan in core.plans() if sum(plan["nbytes"]) == nbytes]
    plan = max(plans, key=lambda plan: plan["batches"])
    return sum(plan["nbytes"][i] for i in plan_file.groups(plan)[-1])


def sum_alone(nbytes: int, iterations: int) -> dict[str, Any]:
    """Measures gradred's sum of as many bytes of an array, in place. Collective."""
    import gradred

    array = np.ones(nbytes // 4, np.float32)
    return loop(
        lambda: gradred.allreduce(array, gradred.Sum, "alone", out=array),
        iterations,
        3,
        lambda: array.fill(1),
    )


# Calibrated work.


@functools.cache
def _work_ops() -> Any:
    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    flags = [flag for flag in flags if not flag.startswith("--std")]
    return tf.load_op_library(str(native.build("work.cpp", flags, f"-tf{tf.__version__}")))


def work_units_a_ms() -> float:
    """Rounds of arithmetic that this core does in a millisecond. Local."""
    units, times = 1_000_000, []
    run = tf.function(lambda x: _work_ops().bench_work(x, units=units, sleep=False))
    for _ in range(5):
        begun = time.perf_counter()
        run(tf.constant(1.0))
        times.append(time.perf_counter() - begun)
    return units / (min(times) * 1e3)


def _layer(
    x: tf.Tensor, variable: tf.Variable, base: tf.Tensor, units: int = 0, sleep: bool = False
) -> tf.Tensor:
    """``x``; backwards: work, then the variable's gradient, ``base`` times the cotangent."""

    @tf.custom_gradient
    def forward(x: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def backward(cotangent: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            if units:
                cotangent = _work_ops().bench_work(cotangent, units=units, sleep=sleep)
            return cotangent, base * cotangent

        return tf.identity(x), backward

    return forward(x, tf.convert_to_tensor(variable))


def layers(
    units: Sequence[int], counts: Sequence[int], groups: Any, sleep: bool = False
) -> Program:
    """A backward pass of as many layers as there are ``counts``.

    Layer i, from the last to the first, takes ``units[i]`` of work and then has a gradient of
    ``counts[i]`` float32. groups: gradred's, or lists of numbers of layers.
    """
    assert _library is not None
    library = _library
    patterns = [np.arange(count, dtype=np.float32) % 5 for count in counts]
    bases = [tf.constant(pattern + me.rank) for pattern in patterns]
    variables = [
        tf.Variable(tf.zeros([count]), name=f"layer_{i}/kernel") for i, count in enumerate(counts)
    ]
    if isinstance(groups, list):
        groups = [[variables[i] for i in members] for members in groups]

    source = tf.Variable(1.0, trainable=False)  # no constant: nothing can be computed beforehand

    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = x = source.read_value()
            for i, variable in enumerate(variables):
                y = _layer(y, variable, bases[i], units[i], sleep)
        # A cotangent that is known beforehand would let TensorFlow do the work beforehand.
        return library.tape(tape, groups).gradient(y, variables, output_gradients=x)

    def check(results: list[tf.Tensor]) -> tuple[int, int]:
        mean = (me.size - 1) / 2
        wrong = sum(
            int(np.count_nonzero(result.numpy() != pattern + np.float32(mean)))
            for result, pattern in zip(results, patterns, strict=True)
        )
        return wrong, sum(counts)

    return Program(step, check)


# Gradients without a network.


def gradients(counts: Sequence[int], mode: str, groups: Any = None) -> Program:
    """A step of ``counts`` gradients of float32: made, averaged, added to the variables.

    mode: "each" (a call a gradient), "grouped" (one call) or "tape".
    """
    assert _library is not None
    library = _library
    variables = [
        tf.Variable(tf.zeros([count]), name=f"layer_{i}/kernel") for i, count in enumerate(counts)
    ]
    bases = [tf.Variable(tf.fill([count], float(me.rank)), trainable=False) for count in counts]
    rate = tf.Variable(1.0, trainable=False)

    def step() -> None:
        if mode == "tape":
            with tf.GradientTape() as tape:
                y = x = rate.read_value()
                for variable, base in zip(variables, bases, strict=True):
                    y = _layer(y, variable, base)
            found = library.tape(tape, groups).gradient(y, variables, output_gradients=x)
        else:
            local = [b * rate for b in bases]
            found = (library.each if mode == "each" else library.grouped)(local)
        for variable, gradient in zip(variables, found, strict=True):
            variable.assign(gradient)

    def check(_: Any) -> tuple[int, int]:
        mean = np.float32((me.size - 1) / 2)
        wrong = sum(int(np.count_nonzero(v.numpy() != mean)) for v in variables)
        return wrong, sum(counts)

    return Program(step, check)


# Networks.


def _dense() -> tuple[tf.keras.Model, tuple[int, ...], int]:
    """351 thousand parameters; some 15 ms a step on one core."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(384, activation="relu"),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(1),
        ]
    )
    return model, (784,), 1024


def _wide() -> tuple[tf.keras.Model, tuple[int, ...], int]:
    """12.5 million parameters: 50 MB of gradients, 100 to 300 ms a step on one core."""
    conv = functools.partial(tf.keras.layers.Conv2D, padding="same", activation="relu")
    model = tf.keras.Sequential(
        [
            conv(64, 3, strides=2),
            conv(256, 3, strides=2),
            *[conv(512, 3) for _ in range(5)],
            conv(384, 3),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(1),
        ]
    )
    return model, (32, 32, 3), 2


def _diffraction() -> tuple[tf.keras.Model, tuple[int, ...], int]:
    """The network of examples/diffraction."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "diffraction"))
    import model as densenet

    return densenet.build(densenet.PRESETS["default"]), (64, 64, 64), 4


NETWORKS = {"dense": _dense, "wide": _wide, "diffraction": _diffraction}


def network(name: str, groups: Any = None, batch: int | None = None) -> Program:
    """A step of training on one batch that stays the same, with SGD and momentum."""
    assert _library is not None
    library = _library
    tf.keras.utils.set_random_seed(0)  # the same weights on all ranks
    model, shape, usual = NETWORKS[name]()
    rng = np.random.default_rng(me.rank)
    x = tf.constant(rng.random((batch or usual, *shape), np.float32))
    y = tf.zeros_like(model(x))
    variables = model.trainable_variables
    optimizer = tf.keras.optimizers.SGD(1e-6, momentum=0.9)
    optimizer.build(variables)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        found = library.tape(tape, groups).gradient(loss, variables)
        optimizer.apply_gradients(zip(found, variables, strict=True))
        return loss

    return Program(step)


def network_facts(name: str) -> dict[str, float]:
    """Parameters, gradients and bytes of a network, and samples a step."""
    model, shape, batch = NETWORKS[name]()
    model(tf.zeros((1, *shape)))
    sizes = [int(np.prod(v.shape)) for v in model.trainable_variables]
    return {
        "parameters": sum(sizes),
        "gradients": len(sizes),
        "nbytes": 4 * sum(sizes),
        "batch": batch,
    }
