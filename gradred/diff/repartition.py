"""Repartition: the blocks of a global array, moved to another division among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import tensorflow as tf
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_tensor, operation, run
from gradred.errors import InvalidArgument

__all__ = ["grid_blocks", "repartition"]

# Of each rank: for each dimension, its first index and the one behind its last.
Blocks = Sequence[Sequence[tuple[int, int]]]


def grid_blocks(shape: Sequence[int], dims: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The blocks of an array that is divided by a grid of ranks as equally as can be. Local.

    shape: of the global array; dims: the numbers of blocks by dimension; their product is the
    number of ranks, the last dimension runs fastest. The first blocks are longer by one where it
    does not divide.
    """
    if len(shape) != len(dims):
        raise InvalidArgument(f"grid_blocks: shape {tuple(shape)} by a grid of {tuple(dims)}")
    cuts = [
        np.concatenate([[0], np.cumsum([n // k + (i < n % k) for i in range(k)])])
        for n, k in zip(shape, dims, strict=True)
    ]
    return [
        [(int(cut[i]), int(cut[i + 1])) for i, cut in zip(place, cuts, strict=True)]
        for place in np.ndindex(*dims)
    ]


@operation
def repartition(
    x: Any, context: Context, before: Blocks, after: Blocks, name: str | None = None
) -> tf.Tensor:
    """This rank's block of a global array in another division. Collective; differentiable.

    before, after: the ranks' blocks, the same lists on all ranks; each divides the same indices
    without a gap or an overlap, empty blocks allowed. x: this rank's block of ``before``; its
    dimensions behind those of the blocks are moved whole. The adjoint moves the cotangents back.

    Raises: InvalidArgument: blocks that overlap or leave gaps, or not as many as ranks.
    """
    x = as_tensor(x, "repartition")
    try:
        boxes = [np.array(b, np.int64).reshape(context.size, -1, 2) for b in (before, after)]
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"repartition in context '{context.name}': before={before!r}, after={after!r}: "
            f"expected for each of the {context.size} ranks a (begin, end) of each dimension"
        ) from None
    _check(boxes, context)
    dims = boxes[0].shape[1]
    params = [dims]
    for old, new in zip(*boxes, strict=True):
        params += [*old[:, 0], *old[:, 1], *new[:, 0], *new[:, 1]]
    mine = boxes[1][context.rank]
    shape = [*(mine[:, 1] - mine[:, 0]).tolist(), *x.shape[dims:]]
    [y] = run(
        context, "repartition", [x], params=[int(p) for p in params], shapes=[shape], name=name
    )
    return y


def _check(boxes: list[np.ndarray], context: Context) -> None:
    if boxes[0].shape != boxes[1].shape:
        raise InvalidArgument(
            f"repartition in context '{context.name}': expected blocks of equally many dimensions "
            f"before and after, got {boxes[0].shape[1]} and {boxes[1].shape[1]}"
        )
    wholes: list[Any] = []
    for name, blocks in zip(("before", "after"), boxes, strict=True):
        full = blocks[np.all(blocks[:, :, 1] > blocks[:, :, 0], 1)]
        if len(full) == 0:
            wholes.append([])
            continue
        low, high = full[:, :, 0].min(0), full[:, :, 1].max(0)
        wholes.append([low.tolist(), high.tolist()])
        counted = int(np.prod(full[:, :, 1] - full[:, :, 0], 1).sum())
        overlap = any(
            np.all(np.minimum(a[:, 1], b[:, 1]) > np.maximum(a[:, 0], b[:, 0]))
            for i, a in enumerate(full)
            for b in full[:i]
        )
        if overlap or counted != int(np.prod(high - low)):
            raise InvalidArgument(
                f"repartition in context '{context.name}': the blocks {name} overlap or leave "
                f"gaps: {blocks.tolist()}"
            )
    if wholes[0] != wholes[1]:
        raise InvalidArgument(
            f"repartition in context '{context.name}': the blocks divide {wholes[0]} before and "
            f"{wholes[1]} after"
        )


def _boxes(params: Sequence[int]) -> np.ndarray:
    """[rank, before or after, begin or end, dimension]"""
    return np.array(params[1:], np.int64).reshape(-1, 2, 2, params[0])


def _peers(node: Node) -> list[int]:
    boxes, rank = _boxes(node.params), node.context.rank

    def meet(a: np.ndarray, b: np.ndarray) -> bool:
        return bool(np.all(np.minimum(a[1], b[1]) > np.maximum(a[0], b[0])))

    return [
        r
        for r in range(node.context.size)
        if r != rank and (meet(boxes[rank, 0], boxes[r, 1]) or meet(boxes[r, 0], boxes[rank, 1]))
    ]


@adjoint_of("repartition", "repartition", _peers)
def _adjoint(node: Node, cotangent: tf.Tensor) -> list[tf.Tensor]:
    back = [node.params[0], *_boxes(node.params)[:, ::-1].ravel().tolist()]
    [x] = node.inputs
    return run(node.context, "repartition", [cotangent], params=back, shapes=[x.shape])
