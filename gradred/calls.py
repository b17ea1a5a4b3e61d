"""A collective call on arrays: run at once, or started and waited for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from gradred._native import core

if TYPE_CHECKING:
    Spec = core.Spec

__all__ = ["Call", "Handle", "Result", "poll", "synchronize"]

T = TypeVar("T")
# Of a tensor: its output (None of a barrier), ranks that brought one, rows from each rank.
Result = tuple["np.ndarray | None", int, "list[int]"]


class Handle(Generic[T]):
    """A call that goes on beside its caller, as functions whose names end in ``_async`` return it.

    Its arrays, also ``out``, must not be read or written before it is done. A handle that goes away
    does not stop the call.
    """

    def __init__(self, batch: Any, result: Callable[[list[Result]], T]) -> None:
        self._batch, self._result = batch, result  # batch: None of a call on no arrays

    def done(self) -> bool:
        """Whether ``wait`` would return at once. Local, does not wait."""
        return self._batch is None or self._batch.done()

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the call; its result, as the function of the same name without ``_async`` has.

        timeout: seconds; None: as long as it takes. After KeyboardInterrupt and Timeout the call
        goes on, and may be waited for again.

        Raises: Timeout; InvalidArgument: a timeout below 0; what the call raises.
        """
        return self._result([] if self._batch is None else self._batch.wait(timeout))


def poll(handle: Handle[Any]) -> bool:
    """``handle.done()``, under Horovod's name."""
    return handle.done()


def synchronize(handle: Handle[T]) -> T:
    """``handle.wait()``, under Horovod's name."""
    return handle.wait()


@dataclass(frozen=True)
class Call(Generic[T]):
    """A call whose arguments are good, before the engine gets it.

    spec: what it asks for; None of a call on no arrays. result: from what the engine gives.
    """

    spec: Spec | None
    inputs: Sequence[np.ndarray | None]
    result: Callable[[list[Result]], T]
    outputs: Sequence[np.ndarray] = ()
    splits: Sequence[Sequence[int] | None] = ()

    def run(self) -> T:
        if self.spec is None:
            return self.result([])
        return self.result(core.run(self.spec, self.inputs, self.outputs, self.splits))

    def start(self) -> Handle[T]:
        batch = self.spec and core.start(self.spec, self.inputs, self.outputs, self.splits)
        return Handle(batch, self.result)
