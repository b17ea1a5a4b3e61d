"""The Poisson equation with a variable coefficient: - div(k grad u) = f, u = 0 on the edge."""

from __future__ import annotations

from typing import Any

import numpy as np

import tensorflow as tf
from gradred.diff import sparse
from gradred.diff.node import operation
from gradred.errors import InvalidArgument
from gradred.pde.grids import Grid

__all__ = ["Poisson"]


class Poisson:
    """A discretization on the nodes of a grid. Collective over the grid's context to make.

    The nodes are those inside the domain; its edge lies one spacing beyond the outermost ones.
    Second order in the spacing where the coefficient is smooth.

    Attributes:
        points: coordinates of the points where this rank takes the coefficient, [points, 2].
        pattern: of the matrix, symmetric positive definite for positive coefficients; node (i, j)
            of a block has row ``pattern.first_row + i * columns of the block + j``.
    """

    grid: Grid
    points: np.ndarray
    pattern: sparse.Pattern

    @operation
    def __init__(self, grid: Grid, method: str = "differences") -> None:
        """Sets the matrix's pattern up.

        grid: of two dimensions. method: "differences": five-point stencil with the coefficient in
        the middle between neighbours; "elements": linear finite elements on triangles, each cell of
        the grid cut along its diagonal, with the coefficient at their centroids and a lumped mass.

        Raises: InvalidArgument: another number of dimensions, or method.
        """
        if len(grid.shape) != 2:
            raise InvalidArgument(f"Poisson: expected a grid of 2 dimensions, got {grid.shape}")
        if method not in ("differences", "elements"):
            raise InvalidArgument(
                f"Poisson: method={method!r}: expected 'differences' or 'elements'"
            )
        self.grid = grid
        make = _differences if method == "differences" else _elements
        ends, weights, points = make(grid)
        # Each contribution joins two nodes; nodes on the edge have no row.
        known = np.all(_inside(ends, grid.shape), axis=1)
        rows, columns = (_numbers(grid, ends[known, side]) for side in (0, 1))
        self._weights = weights[known]
        self._of_point = np.repeat(np.arange(len(points)), len(ends) // max(len(points), 1))[known]
        self.points = _coordinates(grid, points)
        sizes = [int(np.prod(_block(grid, r)[1])) for r in range(grid.context.size)]
        total = int(np.prod(grid.shape))
        self.pattern = sparse.Pattern(rows, columns, (total, total), grid.context, row_counts=sizes)

    @operation
    def matrix(self, coefficient: Any) -> tf.Tensor:
        """The values of the matrix, times the area of a cell. Collective; differentiable.

        coefficient: k at ``points``, [points], float32 or float64.
        """
        k = tf.convert_to_tensor(coefficient)
        if not k.shape.is_compatible_with([len(self.points)]):
            raise InvalidArgument(
                f"Poisson: coefficient: expected one at each of the {len(self.points)} points, got "
                f"shape {k.shape}"
            )
        triplets = tf.gather(k, self._of_point) * tf.cast(self._weights, k.dtype)
        return sparse.assemble(self.pattern, triplets)

    @operation
    def __call__(self, coefficient: Any, source: Any, **options: Any) -> tf.Tensor:
        """Solves for u, of ``grid.block_shape``. Collective; differentiable by both.

        coefficient: k at ``points``. source: f at this rank's nodes, of ``grid.block_shape``.
        options: of ``diff.sparse.solve``.
        """
        f = tf.convert_to_tensor(source)
        if not f.shape.is_compatible_with(self.grid.block_shape):
            raise InvalidArgument(
                f"Poisson: source: expected shape {self.grid.block_shape}, got {f.shape}"
            )
        area = tf.constant(self.grid.spacing[0] * self.grid.spacing[1], f.dtype)
        b = tf.reshape(f, [-1]) * area
        u = sparse.solve(self.pattern, self.matrix(coefficient), b, **options)
        return tf.reshape(u, self.grid.block_shape)


def _coordinates(grid: Grid, indices: np.ndarray) -> np.ndarray:
    """Coordinates of places given by (fractions of) indices of nodes, [n, 2]."""
    return np.asarray(grid.origin + indices * np.asarray(grid.spacing))


def _inside(nodes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.all((nodes >= 0) & (nodes < shape), axis=-1))


def _block(grid: Grid, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """First node and number of nodes of a rank's block, by dimension."""
    parts = grid.slices_of(rank)
    begin = np.array([part.start for part in parts])
    return begin, np.array([part.stop for part in parts]) - begin


def _numbers(grid: Grid, nodes: np.ndarray) -> np.ndarray:
    """Rows of nodes, [n, 2] -> [n]: block by block in the order of ranks."""
    limits = [np.concatenate([[0], np.cumsum(sizes)]) for sizes in grid.blocks]
    place = [np.searchsorted(limits[d], nodes[:, d], side="right") - 1 for d in (0, 1)]
    ranks = place[0] * grid.context.dims[1] + place[1]
    sizes = np.outer(grid.blocks[0], grid.blocks[1]).reshape(-1)
    first = np.concatenate([[0], np.cumsum(sizes)])[ranks]
    local = [nodes[:, d] - limits[d][place[d]] for d in (0, 1)]
    return np.asarray(first + local[0] * np.asarray(grid.blocks[1])[place[1]] + local[1])


def _owned(grid: Grid) -> np.ndarray:
    """The nodes of this rank's block, and those one beyond the grid that follow its own, [n, 2].

    A face or cell is numbered by the node at its far end, so each belongs to one rank.
    """
    begin, count = _block(grid, grid.context.rank)
    ends = [b + n + (b + n == total) for b, n, total in zip(begin, count, grid.shape, strict=True)]
    axes = np.meshgrid(*(np.arange(b, e) for b, e in zip(begin, ends, strict=True)), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes], axis=1)


# Both return, of this rank: the pairs of nodes that contributions join, [n, 2, 2]; their weights
# for a coefficient of one, [n]; and the points, as indices, each with equally many contributions.


def _differences(grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    spacing = grid.spacing
    all_ends, all_weights, all_points = [], [], []
    for d in (0, 1):
        ahead = _owned(grid)
        across = 1 - d
        ahead = ahead[ahead[:, across] < grid.shape[across]]  # faces along d between nodes
        behind = ahead - np.eye(2, dtype=int)[d]
        weight = spacing[across] / spacing[d]
        pairs = [(behind, behind), (ahead, ahead), (behind, ahead), (ahead, behind)]
        all_ends.append(np.stack([np.stack(pair, 1) for pair in pairs], 1).reshape(-1, 2, 2))
        all_weights.append(np.tile(np.array([1.0, 1.0, -1.0, -1.0]) * weight, len(ahead)))
        all_points.append((ahead + behind) / 2)
    return np.concatenate(all_ends), np.concatenate(all_weights), np.concatenate(all_points)


def _elements(grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    corner = _owned(grid) - 1  # of the cell behind each node
    h0, h1 = grid.spacing
    all_ends, all_weights, all_points = [], [], []
    for offsets in ([[0, 0], [1, 0], [1, 1]], [[0, 0], [1, 1], [0, 1]]):
        nodes = corner[:, None, :] + np.array(offsets)  # [cells, 3, 2]
        # Gradients of the linear shape functions, from x -> 1, x, y at the corners.
        places = np.array(offsets) * [h0, h1]
        gradients = np.linalg.inv(np.concatenate([np.ones((3, 1)), places], axis=1))[1:]
        stiffness = gradients.T @ gradients * (h0 * h1 / 2)
        i, j = np.indices((3, 3)).reshape(2, -1)
        all_ends.append(np.stack([nodes[:, i], nodes[:, j]], axis=2).reshape(-1, 2, 2))
        all_weights.append(np.tile(stiffness.reshape(-1), len(corner)))
        all_points.append(nodes.mean(axis=1))
    return np.concatenate(all_ends), np.concatenate(all_weights), np.concatenate(all_points)
