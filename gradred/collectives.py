"""Collectives on arrays.

All take NumPy arrays, tensors with ``__dlpack__`` in host memory (PyTorch, JAX and others), and
what ``numpy.asarray`` takes; results are NumPy arrays of their own, in memory that earlier results
have given back, or the array given as ``out``. bfloat16 comes in as an array of
``ml_dtypes.bfloat16`` or by DLPack, and goes out as the former, or as its bits in uint16 where that
package is missing; a uint16 array is not taken for it. All are collective over the process set and
wait for it; KeyboardInterrupt gets through. They are not differentiable; ``gradred.tensorflow`` has
those that are.

Names: the k-th call of a name on a rank belongs to the k-th on the others. Without a name a call is
named by operation, dtype and the line that makes it, so loops create no new names, and ranks that
come from different lines need a name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradred import basics
from gradred._native import core
from gradred.arrays import Input, as_input, as_list, check_name, check_output
from gradred.calls import Call, Result
from gradred.errors import InvalidArgument
from gradred.process_sets import ProcessSet, global_process_set, member_of
from gradred.reduce_ops import ReduceOp, checked_factors, native_name

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

_WIRES = ("none", "float16", "bfloat16")


def allreduce(
    array: Any,
    op: ReduceOp | int = ReduceOp.Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    wire: str | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Reduces an array over the ranks, element by element.

    array: any shape, the same on all ranks; bool (not Average), int8 to int64, uint8 to uint64,
    float16, bfloat16, float32 or float64. Averages of integers are rounded toward zero and never
    wrap; halves are accumulated in float32. prescale_factor multiplies before, postscale_factor
    after the reduction. wire: "none", "float16" or "bfloat16", the dtype that float32 and float64
    travel in; None: the setting GRADRED_WIRE. What overflows there is counted:
    ``metrics().saturated``.
    out: where the result goes: a C-contiguous, writable NumPy array of the input's shape and dtype,
    the input itself (in place) or one that shares no memory with it. Ranks may differ in giving
    one. After an error its contents are undefined, and they may change until the engine is done
    with the call.

    Returns: an array of the input's shape and dtype, equal on all ranks; ``out`` if given.

    Raises:
        InvalidArgument: dtype, op, wire or out; a prescale_factor for an Average of int64 or
            uint64; this rank is no member of the process set.
        Unsupported: Adasum; a tensor that is not in host memory.
        Mismatch: ranks differ in shape, dtype, op, factors or wire. The same on all ranks.
        Abandoned: another rank gave up. NotInitialized: before ``init()``.
    """
    factors = (prescale_factor, postscale_factor)
    key, spec = known(array, op, name, factors, process_set, wire)
    if spec is not None and (result := spec.run(array, out)) is not None:
        return result
    call = reduction("allreduce", [array], op, name, factors, process_set, wire, out)
    [result] = call.run()
    know(key, array, call)
    return result


def grouped_allreduce(
    arrays: Sequence[Any],
    op: ReduceOp | int = ReduceOp.Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    wire: str | None = None,
) -> list[np.ndarray]:
    """Reduces a list of arrays as one message: all or none. dtypes and shapes may be mixed.

    The list must have the same length, shapes and dtypes on all ranks. Arguments, results and
    errors of each array: see ``allreduce``.
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("grouped_allreduce", arrays, op, name, factors, process_set, wire).run()


def reducescatter(
    array: Any,
    op: ReduceOp | int = ReduceOp.Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    wire: str | None = None,
) -> np.ndarray:
    """Reduces an array over the ranks and leaves each rank its part of the rows.

    array: at least one dimension, the same shape on all ranks. Its first dimension, of any length,
    is spread over the ranks as evenly as can be, in the order of ranks; the lower ones get one row
    more. dtypes, op, factors and wire: see ``allreduce``; what overflows on a wire is
    counted on the rank that packs it.

    Returns: this rank's rows of the reduced array, [rows / ranks (maybe + 1), ...].

    Raises: see ``allreduce``; InvalidArgument also for a scalar.
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("reducescatter", [array], op, name, factors, process_set, wire).run()[0]


def grouped_reducescatter(
    arrays: Sequence[Any],
    op: ReduceOp | int = ReduceOp.Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    wire: str | None = None,
) -> list[np.ndarray]:
    """``reducescatter`` of a list of arrays: all or none. dtypes and shapes may be mixed.

    The list must have the same length, shapes and dtypes on all ranks.
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("grouped_reducescatter", arrays, op, name, factors, process_set, wire).run()


def allgather(
    array: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> np.ndarray:
    """The ranks' arrays one after the other along the first dimension, in the order of ranks.

    array: at least one dimension; the first may differ between ranks (also be 0), the others must
    agree.

    Returns: an array of shape [sum of first dimensions, ...], equal on all ranks.

    Raises: see ``allreduce``; InvalidArgument also for a scalar.
    """
    return gathering("allgather", [array], name, process_set).run()[0]


def grouped_allgather(
    arrays: Sequence[Any], name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[np.ndarray]:
    """``allgather`` of a list of arrays: all or none. dtypes and shapes may be mixed.

    The list must have the same length and dtypes on all ranks, and the same shapes but for the
    first dimensions.
    """
    return gathering("grouped_allgather", arrays, name, process_set).run()


def alltoall(
    array: Any,
    splits: Sequence[int] | np.ndarray | None = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank a part of the rows, and returns the parts from all in the order of ranks.

    array: at least one dimension; the first may differ between ranks (also be 0), the others must
    agree. splits: how many rows go to each rank of the set, in their order, the first rows to the
    first rank; integers whose sum is the first dimension. None: equal parts, and the first
    dimension is a multiple of the number of ranks. Ranks may differ in giving splits.

    Returns: an array of shape [sum of the rows received, ...]; with splits a pair of it and the
    number of rows from each rank, int64 [ranks].

    Raises: see ``allreduce``; InvalidArgument also for a scalar, and for splits that do not fit:
    the other ranks then get Abandoned.
    """
    return exchange(array, splits, name, process_set).run()


def broadcast(
    array: Any,
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray:
    """The array of one rank, on all ranks.

    array: any shape, the same on all ranks; its values matter on root_rank alone. root_rank: a rank
    of the world that is in the process set.

    Returns: an array of that shape, equal on all ranks.

    Raises: see ``allreduce``; InvalidArgument also for a root that is no member.
    """
    return copying(array, root_rank, name, process_set).run()


def barrier(name: str | None = None, *, process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of the process set have called it."""
    number = member_of(process_set, _what("barrier", name))
    domain = name or f"barrier.{_call_site()}"
    core.run(_spec(domain, number, [("barrier", domain, "uint8", ())]), [None])


def exchange(
    array: Any,
    splits: Sequence[int] | np.ndarray | None,
    name: str | None,
    process_set: ProcessSet,
) -> Call[Any]:
    """Of ``alltoall``."""
    what = _what("alltoall", name)
    [value] = _rows([array], what)
    number = member_of(process_set, what)
    counts = None if splits is None else _splits(splits, what, number)
    domain = name or _unnamed("alltoall", [value])
    spec = _spec(domain, number, [("alltoall", domain, value.dtype, value.array.shape)])

    def result(results: list[Result]) -> Any:
        [(array, _, received)] = results
        rows = value.result(_present(array))
        return rows if splits is None else (rows, np.array(received, np.int64))

    return Call(spec, [value.array], result, splits=[counts])


def copying(
    array: Any, root_rank: int, name: str | None, process_set: ProcessSet
) -> Call[np.ndarray]:
    """Of ``broadcast``."""
    what = _what("broadcast", name)
    value = as_input(array, what)
    number = member_of(process_set, what)
    if root_rank not in process_set.ranks:
        raise InvalidArgument(
            f"{what}: root_rank={root_rank!r}: expected a rank of process set {number} "
            f"({', '.join(map(str, process_set.ranks))})"
        )
    domain = name or _unnamed("broadcast", [value])
    entry = ("broadcast", domain, value.dtype, value.array.shape)
    spec = _spec(domain, number, [entry], root=int(root_rank))
    return Call(spec, [value.array], lambda results: value.result(_present(results[0][0])))


def reduction(
    operation: str,
    arrays: Sequence[Any],
    op: ReduceOp | int,
    name: str | None,
    factors: tuple[float, float],  # prescale, postscale
    process_set: ProcessSet,
    wire: str | None,
    out: np.ndarray | None = None,  # of the only array
) -> Call[list[np.ndarray]]:
    """Of ``allreduce`` and ``reducescatter``, also grouped."""
    what = _what(operation, name)
    reduce_op = native_name(op, what)
    scatter = operation.endswith("reducescatter")
    arrays = as_list(arrays, what)
    wire = basics.settings().wire if wire is None else wire
    if wire not in _WIRES:
        raise InvalidArgument(f"{what}: wire={wire!r}: expected one of {', '.join(_WIRES)}")
    factors = checked_factors(*factors, what)
    values = _rows(arrays, what) if scatter else [as_input(array, what) for array in arrays]
    outputs = []
    if out is not None:
        check_output(out, values[0], what)
        outputs = [out]
    number = member_of(process_set, what)
    if not values:
        return Call(None, [], lambda results: [])
    domain = name or _unnamed(operation, values)
    kind = "reducescatter" if scatter else "allreduce"
    entries = _entries(kind, domain, values)
    spec = _spec(domain, number, entries, reduce_op, factors, wire)
    result = _results_of(values) if out is None else lambda results: [out]
    return Call(spec, [value.array for value in values], result, outputs)


# Allreduces of one array that were good before: they need none of the checks of ``reduction``.
# Under the settings of one ``init``.
_Key = tuple[Any, ...]
_known: dict[_Key, core.Spec] = {}
_known_under: Any = None


def known(
    array: Any, op: Any, name: Any, factors: Any, process_set: Any, wire: Any
) -> tuple[_Key | None, core.Spec | None]:
    """Of arguments of ``allreduce``, for the function that a caller outside of gradred has called.

    What makes two calls the same, but for contents and ``out``, or None; and the spec, if known.
    """
    global _known_under
    if type(array) is not np.ndarray:
        return None, None
    settings = basics.current_settings()
    if _known_under is not settings:
        _known.clear()
        _known_under = settings
    if not name:
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__", "").startswith("gradred."):
            return None, None  # the line that names the call is farther out
        name = (frame.f_code, frame.f_lineno)
    number = getattr(process_set, "process_set_id", None)  # it has another when added again
    key = (name, op, array.dtype, array.shape, factors, process_set, number, wire)
    try:
        return key, _known.get(key)
    except TypeError:  # of an argument that has no hash: it will be refused
        return None, None


def know(key: _Key | None, array: Any, call: Call[list[np.ndarray]]) -> None:
    """Keeps the spec of a call on an array that was good as it is."""
    if key is None or call.spec is None or call.inputs[0] is not array:
        return
    if len(_known) >= _MOST_SPECS:
        _known.clear()
    _known[key] = call.spec


# Calls in a loop make the same spec again and again, and the ranks agree faster on a known one.
_specs: dict[tuple[Any, ...], core.Spec] = {}
_MOST_SPECS = 1024


_Entry = tuple[str, str, str, tuple[int, ...]]  # operation, label, dtype, shape


def _spec(
    domain: str,
    process_set: int,
    entries: Sequence[_Entry],
    reduce_op: str = "sum",
    factors: tuple[float, float] = (1.0, 1.0),  # prescale, postscale
    wire: str = "none",
    root: int = 0,
) -> core.Spec:
    key = (domain, process_set, *entries, reduce_op, factors, wire, root)
    spec = _specs.get(key)
    if spec is not None:
        return spec
    if len(_specs) >= _MOST_SPECS:
        _specs.clear()
    described: list[Any] = [
        {
            "label": label,
            "op": operation,
            "reduce_op": reduce_op,
            "dtype": dtype,
            "wire": wire if wire != "none" and dtype in ("float32", "float64") else dtype,
            "shape": list(shape),
            "prescale": factors[0],
            "postscale": factors[1],
            "root": root,
        }
        for operation, label, dtype, shape in entries
    ]
    spec = _specs[key] = core.Spec(domain, process_set, described, [])
    return spec


def _entries(operation: str, domain: str, values: Sequence[Input]) -> list[_Entry]:
    labels = [domain] if len(values) == 1 else [f"{domain}/{i}" for i in range(len(values))]
    return [
        (operation, label, value.dtype, value.array.shape)
        for label, value in zip(labels, values, strict=True)
    ]


def gathering(
    operation: str, arrays: Sequence[Any], name: str | None, process_set: ProcessSet
) -> Call[list[np.ndarray]]:
    """Of ``allgather``, also grouped."""
    what = _what(operation, name)
    values = _rows(as_list(arrays, what), what)
    number = member_of(process_set, what)
    if not values:
        return Call(None, [], lambda results: [])
    domain = name or _unnamed(operation, values)
    spec = _spec(domain, number, _entries("allgather", domain, values))
    return Call(spec, [value.array for value in values], _results_of(values))


def _results_of(values: list[Input]) -> Callable[[list[Result]], list[np.ndarray]]:
    return lambda results: [
        value.result(_present(array)) for value, (array, _, _) in zip(values, results, strict=True)
    ]


def _rows(arrays: Sequence[Any], what: str) -> list[Input]:
    """Arrays whose first dimension counts; refuses scalars."""
    values = [as_input(array, what) for array in arrays]
    for position, value in enumerate(values):
        if value.array.ndim == 0:
            which = what if len(values) == 1 else f"{what}: array {position}"
            raise InvalidArgument(f"{which}: a scalar: expected at least one dimension")
    return values


def _splits(splits: Any, what: str, process_set: int) -> list[int]:
    """Numbers of rows; that they fit is for the engine to see, which tells the other ranks."""
    numbers = np.asarray(splits)
    if numbers.ndim != 1 or (numbers.size > 0 and numbers.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{what}: rank {core.rank()} in process set {process_set}: expected as splits a list "
            f"of integers, got {numbers.dtype.name} {list(numbers.shape)}"
        )
    return [int(number) for number in numbers]


def _what(operation: str, name: str | None) -> str:
    """The call, for messages; refuses what cannot be a name."""
    if name is not None:
        check_name(name, operation)
    return f"{operation} of '{name}'" if name else operation


def _present(array: np.ndarray | None) -> np.ndarray:
    assert array is not None  # every operation but a barrier has an output
    return array


def _unnamed(operation: str, values: Sequence[Input]) -> str:
    dtypes = "+".join(sorted({value.dtype for value in values}))
    return f"{operation}.{dtypes}.{_call_site()}"


def _call_site() -> str:
    """The line outside of gradred that called, as "file.py:12": alike on all ranks.

    The folder is left out, since ranks may see the program under different paths.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gradred."):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
