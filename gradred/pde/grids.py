"""Grids of nodes, cut into a block a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradred import diff
from gradred.diff import Context
from gradred.diff.node import operation
from gradred.errors import InvalidArgument

__all__ = ["Grid", "blocks_of"]


def blocks_of(nodes: int, parts: int) -> list[int]:
    """The sizes of the blocks of ``nodes`` nodes: the first ``nodes % parts`` have one more."""
    return [nodes // parts + (part < nodes % parts) for part in range(parts)]


class Grid:
    """A rectangular grid of nodes over the ranks of a context. Local to make.

    shape: nodes along each dimension, as many as the context's grid of ranks has. spacing: between
    nodes, one length or one a dimension. The coordinates of node (i, j) are origin + (i, j) *
    spacing.

    Raises InvalidArgument, alike on all ranks, if a dimension has fewer nodes than ranks.
    """

    def __init__(
        self,
        shape: Sequence[int],
        context: Context,
        *,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
    ) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.context = context
        self.spacing = _lengths(spacing, len(self.shape))
        self.origin = _lengths(origin, len(self.shape))
        if len(self.shape) != len(context.dims):
            raise InvalidArgument(
                f"Grid: {len(self.shape)} dimensions over a context with a grid of ranks of "
                f"{len(context.dims)}: make it with Context(dims=...)"
            )
        for dim, (nodes, ranks) in enumerate(zip(self.shape, context.dims, strict=True)):
            if nodes < ranks:
                raise InvalidArgument(
                    f"Grid: dimension {dim} has {nodes} nodes for {ranks} ranks: expected at least "
                    "one a rank"
                )
        if not all(h > 0 for h in self.spacing):
            raise InvalidArgument(f"Grid: spacing must be positive, got {self.spacing}")
        self.blocks = tuple(
            blocks_of(nodes, ranks) for nodes, ranks in zip(self.shape, context.dims, strict=True)
        )

    def slices_of(self, rank: int) -> tuple[slice, ...]:
        """Where the block of a rank of the context lies in the whole grid."""
        place = self.context.coordinates_of(rank)
        begins = [sum(sizes[:at]) for sizes, at in zip(self.blocks, place, strict=True)]
        return tuple(
            slice(begin, begin + sizes[at])
            for begin, sizes, at in zip(begins, self.blocks, place, strict=True)
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where this rank's block lies in the whole grid."""
        return self.slices_of(self.context.rank)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Nodes of this rank's block along each dimension."""
        return tuple(part.stop - part.start for part in self.slices)

    def coordinates(self) -> tuple[np.ndarray, ...]:
        """The coordinates of this rank's nodes, one array a dimension."""
        axes = [
            start + step * np.arange(part.start, part.stop)
            for start, step, part in zip(self.origin, self.spacing, self.slices, strict=True)
        ]
        return tuple(np.meshgrid(*axes, indexing="ij"))

    def block(self, whole: Any) -> np.ndarray:
        """This rank's block of an array of the whole grid, a copy. Local."""
        array = np.asarray(whole)
        if array.shape != self.shape:
            raise InvalidArgument(f"Grid.block: expected shape {self.shape}, got {array.shape}")
        return np.ascontiguousarray(array[self.slices])

    @operation
    def whole(self, block: Any) -> np.ndarray:
        """The array of the whole grid, on every rank. Collective over the context.

        block: this rank's, an array or an eager tensor of ``block_shape``. Raises, on all ranks,
        InvalidArgument if one has another shape, and Mismatch if they have several dtypes.
        """
        array = np.ascontiguousarray(block)
        if array.shape != self.block_shape:
            raise InvalidArgument(
                f"Grid.whole: expected shape {self.block_shape}, got {array.shape}"
            )
        values = np.asarray(diff.allgather(array.reshape(-1), self.context))
        result = np.empty(self.shape, dtype=array.dtype)
        at = 0
        for rank in range(self.context.size):
            part = result[self.slices_of(rank)]
            part[...] = values[at : at + part.size].reshape(part.shape)
            at += part.size
        return result


def _lengths(value: float | Sequence[float], dims: int) -> tuple[float, ...]:
    values = tuple(float(v) for v in np.atleast_1d(value))
    if len(values) == 1:
        values *= dims
    if len(values) != dims:
        raise InvalidArgument(f"Grid: expected one length or {dims}, got {value}")
    return values
