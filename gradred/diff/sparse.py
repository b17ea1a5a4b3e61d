"""Distributed sparse matrices: a pattern of entries, and values that gradients flow through.

A matrix is a ``Pattern``, which is made once, and a tensor of this rank's values. Rows lie in
stripes: rank 0 has the first ones, and so on; vectors over rows or columns likewise. Values and
vectors are float32 or float64.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from tensorflow.python.eager import record
from tensorflow.python.framework import ops as tf_ops

import tensorflow as tf
from gradred import basics
from gradred._native import core
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_number, as_tensor, operation, run
from gradred.errors import InvalidArgument

__all__ = ["Pattern", "assemble", "product", "solve"]

_METHODS = {"cg": 0, "bicgstab": 1, "gmres": 2}
_PRECONDITIONERS = {None: 0, "jacobi": 1, "boomeramg": 2}


class Pattern:
    """Where a distributed matrix has entries. Collective over the context to make, in eager mode.

    What was set up for its solves is freed with it. Tapes and graphs with its operations keep it.

    Attributes:
        shape: of the matrix. rows, columns: of this rank. nonzeros: entries of this rank.
        first_row: the first of this rank's rows. indptr, indices: this rank's rows in compressed
        form, with global columns: scipy.sparse.csr_matrix((values, indices, indptr)).
    """

    context: Context
    shape: tuple[int, int]
    rows: int
    columns: int
    nonzeros: int
    first_row: int
    indptr: np.ndarray
    indices: np.ndarray

    @operation
    def __init__(
        self,
        rows: Any,
        columns: Any,
        shape: tuple[int, int],
        context: Context,
        *,
        row_counts: Sequence[int] | None = None,
        column_counts: Sequence[int] | None = None,
    ) -> None:
        """Has an entry wherever any rank has a triplet (rows[k], columns[k]).

        rows, columns: global indices, [triplets], in any order, also of rows of other ranks, also
        several times. shape: of the whole matrix. row_counts: rows of each rank; None: divided as
        equally as can be. column_counts: the same of columns; None: as the rows of a square matrix.

        Raises: InvalidArgument: an index out of range; counts that do not add up to the shape.
        """
        context.require_member("sparse.Pattern")
        if not tf.executing_eagerly():
            raise InvalidArgument("sparse.Pattern: expected eager mode: make it once, outside")
        self.context = context
        self.shape = (int(shape[0]), int(shape[1]))
        limits = _limits(self.shape[0], row_counts, context, "row_counts")
        square = self.shape[0] == self.shape[1] and column_counts is None
        across = (
            limits if square else _limits(self.shape[1], column_counts, context, "column_counts")
        )
        [triplet_rows, triplet_columns] = (
            tf.constant(np.asarray(indices, np.int64).reshape(-1)) for indices in (rows, columns)
        )
        facts, indptr, indices = run(
            context,
            "sparse_pattern",
            [triplet_rows, triplet_columns],
            params=[*limits, *across],
            dtypes=[tf.int64] * 3,
            shapes=[[4], [None], [None]],
        )
        self._number, self.nonzeros, self.rows, self.columns = map(int, facts.numpy())
        self.indptr, self.indices = indptr.numpy(), indices.numpy()
        self.first_row = limits[context.rank]
        self._triplets = len(triplet_rows)
        self._square = limits == across
        weakref.finalize(self, core.sparse_drop_pattern, self._number)
        _patterns[self._number] = self


# Params of nodes have the numbers alone.
_patterns: weakref.WeakValueDictionary[int, Pattern] = weakref.WeakValueDictionary()
_KEPT = "_gradred_patterns"


def _run_on(
    number: int,
    context: Context,
    operation: str,
    inputs: list[tf.Tensor],
    params: Sequence[int],
    **options: Any,
) -> list[tf.Tensor]:
    """``run``, after which the pattern is kept for as long as the node may be used again."""
    pattern = _patterns.get(number)
    outputs = run(context, operation, inputs, params=[number, *params], **options)
    if not tf.executing_eagerly():
        graph = tf_ops.get_default_graph()
        while True:  # a loop's body too belongs to the function that is called
            setattr(graph, _KEPT, getattr(graph, _KEPT, frozenset()) | {pattern})
            graph = getattr(graph, "outer_graph", None)
            if graph is None or not graph.building_function:
                break
    elif record.could_possibly_record():
        for output in outputs:  # which tapes keep
            setattr(output, _KEPT, pattern)
    return outputs


def _limits(total: int, counts: Sequence[int] | None, context: Context, what: str) -> list[int]:
    size = context.size
    if counts is None:
        counts = [total // size + (r < total % size) for r in range(size)]
    counts = [as_number(n, f"sparse.Pattern: {what}") for n in counts]
    if len(counts) != size or sum(counts) != total or min(counts) < 0:
        raise InvalidArgument(
            f"sparse.Pattern in context '{context.name}': {what}={list(counts)}: expected a number "
            f"for each of the {size} ranks, {total} in all"
        )
    return [0, *np.cumsum(counts).tolist()]


def _vector(value: Any, size: int, what: str, pattern: Pattern) -> tf.Tensor:
    x = as_tensor(value, f"sparse {what}")
    if x.dtype not in (tf.float32, tf.float64) or not x.shape.is_compatible_with([size]):
        raise InvalidArgument(
            f"sparse matrix in context '{pattern.context.name}': {what}: expected float32 or "
            f"float64 of shape [{size}], got {x.dtype.name} of shape {x.shape}"
        )
    return x


def _alike(a: tf.Tensor, b: tf.Tensor, pattern: Pattern) -> None:
    if a.dtype != b.dtype:
        raise InvalidArgument(
            f"sparse matrix in context '{pattern.context.name}': values of {a.dtype.name} and a "
            f"vector of {b.dtype.name}: expected one dtype"
        )


@operation
def assemble(pattern: Pattern, triplets: Any, name: str | None = None) -> tf.Tensor:
    """The values of the matrix: each entry is the sum of its triplets. Collective; differentiable.

    triplets: [triplets], in the order of the indices that the pattern was made of. Returns
    [nonzeros]. The adjoint gives each triplet the cotangent of its entry.
    """
    x = _vector(triplets, pattern._triplets, "triplets", pattern)
    [values] = _run_on(
        pattern._number,
        pattern.context,
        "sparse_assemble",
        [x],
        [0],
        shapes=[[pattern.nonzeros]],
        name=name,
    )
    return values


@operation
def product(
    pattern: Pattern, values: Any, x: Any, *, transposed: bool = False, name: str | None = None
) -> tf.Tensor:
    """The matrix times a vector. Collective; differentiable by values and vector.

    values: [nonzeros]. x: this rank's [columns]. Returns [rows]. transposed: of the transposed
    matrix: from [rows] to [columns].
    """
    ends = (pattern.columns, pattern.rows)
    given, wanted = reversed(ends) if transposed else ends
    values = _vector(values, pattern.nonzeros, "values", pattern)
    x = _vector(x, given, "vector", pattern)
    _alike(values, x, pattern)
    [y] = _run_on(
        pattern._number,
        pattern.context,
        "sparse_product",
        [values, x],
        [int(transposed)],
        shapes=[[wanted]],
        name=name,
    )
    return y


@operation
def solve(
    pattern: Pattern,
    values: Any,
    b: Any,
    *,
    method: str = "cg",
    preconditioner: str | None = "jacobi",
    rtol: float | None = None,
    atol: float = 0.0,
    max_iterations: int = 10000,
    with_residuals: bool = False,
    name: str | None = None,
) -> Any:
    """The solution x of A x = b. Collective; differentiable by values and right-hand side.

    values: [nonzeros], of a square matrix. b: this rank's [rows]. method: "cg", for symmetric
    positive definite matrices (which is not checked but for what shows up), or "bicgstab" or
    "gmres" (begun anew after 30 iterations) for any.
    preconditioner: "jacobi", "boomeramg" (of HYPRE, if it is installed and the job runs on its
    MPI), or None. Finished when the norm of b - A x is at most max(rtol * norm of b, atol); rtol:
    None: 1e-10, for float32 1e-5; the iteration computes in float64. with_residuals: returns the
    norms of the residuals over that of b too, float64, [iterations + 1].

    The adjoint solves with the transposed matrix, with what was set up for the forward solve: l =
    A'^-1 x_bar is the cotangent of b, and -l_i x_j that of the entry (i, j).

    Raises: InvalidArgument, on all ranks: no convergence, with the residuals; a matrix that the
        method or the preconditioner cannot work with; a solution that the dtype cannot hold; HYPRE
        asked for and not there.
    """
    if not pattern._square:
        raise InvalidArgument(
            "sparse solve: expected a square matrix with equal row and column "
            f"counts, got shape {pattern.shape}"
        )
    for value, known, what in (
        (method, _METHODS, "method"),
        (preconditioner, _PRECONDITIONERS, "preconditioner"),
    ):
        if value not in known:
            raise InvalidArgument(f"sparse solve: {what}={value!r}: expected one of {list(known)}")
    values = _vector(values, pattern.nonzeros, "values", pattern)
    b = _vector(b, pattern.rows, "right-hand side", pattern)
    _alike(values, b, pattern)
    if rtol is None:
        rtol = 1e-10 if b.dtype == tf.float64 else 1e-5
    bits = struct.unpack("<2q", struct.pack("<2d", rtol, atol))
    most = as_number(max_iterations, "sparse solve: max_iterations")
    hypre = basics.settings().hypre_library.encode()
    params = [_METHODS[method], _PRECONDITIONERS[preconditioner], *bits, most, *hypre]
    x, residuals = _run_on(
        pattern._number,
        pattern.context,
        "sparse_solve",
        [values, b],
        [0, *params],
        dtypes=[b.dtype, tf.float64],
        shapes=[b.shape, [None]],
        name=name,
    )
    return (x, residuals) if with_residuals else x


# --- Adjoints: see Note [Transposition] in native/src/sparse/product.h ---


def _peers(node: Node) -> list[int]:
    return core.sparse_peers(node.params[0])


def _run(node: Node, operation: str, inputs: list[tf.Tensor], like: Any, *params: int) -> tf.Tensor:
    [y] = _run_on(node.params[0], node.context, operation, inputs, params, shapes=[like.shape])
    return y


@adjoint_of("sparse_assemble", "sparse_assemble")
def _adjoint_of_assemble(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    return [_run(node, "sparse_assemble", [cotangent], node.inputs[0], 1 - node.params[1])]


@adjoint_of("sparse_product", "sparse_product", _peers)
def _adjoint_of_product(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    values, x = node.inputs
    transposed = node.params[1]
    ends = [x, cotangent] if transposed else [cotangent, x]
    return [
        _run(node, "sparse_outer", ends, values),
        _run(node, "sparse_product", [values, cotangent], x, 1 - transposed),
    ]


@adjoint_of("sparse_outer", "sparse_product", _peers)
def _adjoint_of_outer(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    y, x = node.inputs
    return [
        _run(node, "sparse_product", [cotangent, x], y, 0),
        _run(node, "sparse_product", [cotangent, y], x, 1),
    ]


@adjoint_of("sparse_solve", "sparse_solve")
def _adjoint_of_solve(node: Node, cotangent: Any, _: Any) -> list[tf.Tensor]:
    values, b = node.inputs
    x = node.outputs[0]
    number, transposed, *options = node.params
    if cotangent is None:
        cotangent = tf.zeros_like(x)
    adjoint, _ = _run_on(
        number,
        node.context,
        "sparse_solve",
        [values, cotangent],
        [1 - transposed, *options],
        dtypes=[b.dtype, tf.float64],
        shapes=[b.shape, [None]],
    )
    ends = [x, adjoint] if transposed else [adjoint, x]
    return [-_run(node, "sparse_outer", ends, values), adjoint]
