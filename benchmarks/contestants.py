"""The libraries that reduce a tensor, each behind the same four functions. Runs inside the ranks.

``begin(kind)`` starts one; ``block(...)`` measures a block of allreduces of one tensor.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bench import native
from bench.measure import engine_threads, loop, me

__all__ = ["KINDS", "Kind", "available", "begin", "block", "copy_bandwidth", "refuses"]

HALVES = ("float16", "bfloat16")
_LARGE = 32 << 20  # bytes of a tensor that a contestant does not keep while others have their turn


@dataclass(frozen=True)
class Kind:
    """A contestant as the parent starts it."""

    cls: str
    title: str
    needs: tuple[str, ...] = ()  # packages
    env: dict[str, str] = field(default_factory=dict)
    launcher: str = "auto"


_TUNED = {"HOROVOD_CYCLE_TIME": "0.1", "OMPI_MCA_mpi_yield_when_idle": "1"}

# Columns of the tables, in this order.
KINDS = {
    "gradred": Kind("GradredArray", "gradred on arrays, in place"),
    "graph": Kind("GradredGraph", "gradred in a tf.function", ("tensorflow",)),
    "null": Kind(
        "GradredGraph",
        "the same tf.function with GRADRED_NULL=1",
        ("tensorflow",),
        {"GRADRED_NULL": "1"},
    ),
    "eager": Kind("GradredEager", "gradred, eager TensorFlow", ("tensorflow",)),
    "mpi": Kind("RawMpi", "MPI_Allreduce in place", ("mpi4py",)),
    "horovod": Kind("HorovodGraph", "Horovod in a tf.function, MPI, as it is", ("horovod",)),
    "tuned": Kind(
        "HorovodGraph", "Horovod, cycle of 0.1 ms, MPI that yields", ("horovod",), _TUNED
    ),
    "hvd_eager": Kind("HorovodEager", "tuned Horovod, eager TensorFlow", ("horovod",), _TUNED),
    "hvd_gloo": Kind(
        "HorovodGloo",
        "Horovod over Gloo",
        ("horovod",),
        {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",
        },
        "local",
    ),
    "torch": Kind("TorchGloo", "torch.distributed over Gloo", ("torch",), launcher="local"),
    "copy": Kind("CopyLoop", "bare shared-memory copy loop", (), launcher="local"),
}


def available(kind: str) -> bool:
    """Whether its packages are installed. In the parent."""
    return all(importlib.util.find_spec(name) is not None for name in KINDS[kind].needs)


def dtype_of(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class Tensor:
    """One rank's input, freshly written before each iteration, and the sum that must come out.

    Values are small integers, so that sums are exact in halves too, up to 8 ranks.
    """

    def __init__(self, count: int, dtype: str) -> None:
        kind = dtype_of(dtype)
        pattern = (np.arange(min(count, 1 << 16)) % 5).astype(np.float32)
        tile = (pattern + me.rank).astype(kind)
        total = (pattern * me.size + me.size * (me.size - 1) / 2).astype(kind)
        self._expected = total
        self.source = np.resize(tile, count) if count else np.empty(0, kind)
        self.work = np.zeros(count, kind)

    def refill(self) -> None:
        native.copy(self.work, self.source)

    def check(self, result: np.ndarray) -> tuple[int, int]:
        """Wrong elements, and elements."""
        flat, wrong, step = result.reshape(-1), 0, len(self._expected)
        # The pattern's period does not divide the tile: compare tile by tile, as it was laid.
        for begin in range(0, flat.size, step):
            part = flat[begin : begin + step]
            wrong += int(np.count_nonzero(part != self._expected[: part.size]))
        return wrong, flat.size


class Contestant(ABC):
    """A library that was started on this rank."""

    def tensor(self, tensor: Tensor) -> None:
        """Takes the tensor that the next calls reduce."""
        self._tensor = tensor

    def prepare(self) -> None:
        """Before each call, not timed."""
        self._tensor.refill()

    @abstractmethod
    def run(self) -> None:
        """Sums the tensor over the ranks."""

    @abstractmethod
    def result(self) -> np.ndarray: ...

    def refuses(self, dtype: str) -> str:
        """Why it cannot reduce that dtype, or nothing."""
        return ""

    def started(self) -> None:
        """What it has from now on belongs to a tensor."""
        self._own = {"_own", *vars(self)}

    def release(self) -> None:
        """Lets go of the tensor and of what was made for it: the others need memory too."""
        for name in set(vars(self)) - self._own:
            delattr(self, name)


class GradredArray(Contestant):
    def __init__(self) -> None:
        import gradred

        with engine_threads():
            gradred.init()
        self._lib = gradred
        self._in_place = "out" in inspect.signature(gradred.allreduce).parameters

    def run(self) -> None:
        work = self._tensor.work
        options = {"out": work} if self._in_place else {}
        self._result = self._lib.allreduce(work, op=self._lib.Sum, name="bench", **options)

    def result(self) -> np.ndarray:
        return self._result


class _Graph(Contestant):
    """A tf.function that makes a tensor of its own, as a backward pass makes a gradient, and sums
    it. The copy is a part of the time."""

    def __init__(self) -> None:
        import tensorflow as tf

        self._tf = tf
        self._init()

    @abstractmethod
    def _init(self) -> None: ...

    @abstractmethod
    def _sum(self, gradient: Any) -> Any: ...

    def tensor(self, tensor: Tensor) -> None:
        super().tensor(tensor)
        tf = self._tf
        self._input = tf.constant(tensor.source)

        @tf.function(input_signature=[tf.TensorSpec(self._input.shape, self._input.dtype)])
        def function(x: Any) -> Any:
            return self._sum(tf.raw_ops.DeepCopy(x=x))

        self._function = function.get_concrete_function()

    def prepare(self) -> None:
        self._output = None  # its memory is free for the next

    def run(self) -> None:
        self._output = self._function(self._input)

    def result(self) -> np.ndarray:
        return self._output.numpy()


class GradredGraph(_Graph):
    def _init(self) -> None:
        import gradred.tensorflow as hvd

        with engine_threads():
            hvd.init()
        self._lib = hvd

    def _sum(self, gradient: Any) -> Any:
        return self._lib.allreduce(gradient, op=self._lib.Sum)


class HorovodGraph(_Graph):
    def _init(self) -> None:
        import horovod.tensorflow as hvd

        with engine_threads():
            hvd.init()
        self._lib = hvd

    def _sum(self, gradient: Any) -> Any:
        return self._lib.allreduce(gradient, op=self._lib.Sum)


class _Eager(_Graph):
    """Without a tf.function, of a tensor that is there."""

    def tensor(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._input = self._tf.constant(tensor.source)

    def run(self) -> None:
        self._output = self._lib.allreduce(self._input, op=self._lib.Sum, name="eager")


class GradredEager(_Eager, GradredGraph):
    pass


class HorovodEager(_Eager, HorovodGraph):
    pass


class HorovodGloo(HorovodGraph):
    def _init(self) -> None:
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[f"HOROVOD_{name}"] = str(me.rank)
        for name in ("SIZE", "LOCAL_SIZE"):
            os.environ[f"HOROVOD_{name}"] = str(me.size)
        os.environ.update(HOROVOD_CROSS_RANK="0", HOROVOD_CROSS_SIZE="1")
        os.environ.update(HOROVOD_HOSTNAME="localhost")
        super()._init()


class RawMpi(Contestant):
    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI

    def refuses(self, dtype: str) -> str:
        return "MPI has no such type everywhere" if dtype in HALVES else ""

    def run(self) -> None:
        self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, self._tensor.work)

    def result(self) -> np.ndarray:
        return self._tensor.work


class TorchGloo(Contestant):
    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = f"file://{os.environ['BENCH_SOCKET']}.store"
        with engine_threads():
            dist.init_process_group("gloo", init_method=store, rank=me.rank, world_size=me.size)
        self._torch, self._dist = torch, dist

    def tensor(self, tensor: Tensor) -> None:
        super().tensor(tensor)
        if tensor.work.dtype.name == "bfloat16":
            self._view = self._torch.from_numpy(tensor.work.view(np.int16))
            self._view = self._view.view(self._torch.bfloat16)
        else:
            self._view = self._torch.from_numpy(tensor.work)

    def run(self) -> None:
        self._dist.all_reduce(self._view)

    def result(self) -> np.ndarray:
        return self._tensor.work


class CopyLoop(Contestant):
    def tensor(self, tensor: Tensor) -> None:
        super().tensor(tensor)
        path = f"{os.environ['BENCH_SHARED']}-slots"
        self.region = native.Region(path, me.rank, me.size, max(1, tensor.work.nbytes))
        self.region.remove()

    def run(self) -> None:
        self.region.copy_loop(self._tensor.work)

    def result(self) -> np.ndarray:
        return self._tensor.work


_contestant: Contestant | None = None


def begin(kind: str) -> None:
    """Starts the library. Collective."""
    global _contestant
    _contestant = globals()[KINDS[kind].cls]()
    _contestant.started()


def refuses(dtype: str) -> str:
    assert _contestant is not None
    return _contestant.refuses(dtype)


def block(
    count: int, dtype: str, iterations: int, warmup: int, silence_s: float = 0.0
) -> dict[str, Any]:
    """Measures a block of sums of ``count`` elements. Collective.

    silence_s: seconds to sleep before each, not timed.
    """
    import time

    contestant = _contestant
    assert contestant is not None
    tensor = Tensor(count, dtype)
    contestant.tensor(tensor)

    def prepare() -> None:
        contestant.prepare()
        if silence_s:
            time.sleep(silence_s)

    def check() -> tuple[int, int]:
        exact = os.environ.get("GRADRED_NULL") != "1"
        if isinstance(contestant, CopyLoop):
            exact = dtype not in HALVES  # which it moves and does not sum
        return tensor.check(contestant.result()) if exact else (0, 0)

    result = loop(contestant.run, iterations, warmup, prepare, check)
    if isinstance(contestant, CopyLoop):
        contestant.region.close()
    if tensor.source.nbytes >= _LARGE:
        contestant.release()
    return result


def copy_bandwidth(nbytes: int, iterations: int) -> dict[str, Any]:
    """memcpy of that many bytes on all ranks at once, from one array to another."""
    source, to = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return loop(lambda: native.copy(to, source), iterations, 2)


def hand_overs(count: int) -> dict[str, Any]:
    """On all ranks at once: threads wake each other ``2 * count`` times."""
    return loop(lambda: native.hand_over(count), 5, 1)


def barriers(count: int) -> dict[str, Any]:
    """Meetings of all ranks through memory, ``count`` of them."""

    def run() -> None:
        for _ in range(count):
            me.barrier()

    return loop(run, 5, 1)
