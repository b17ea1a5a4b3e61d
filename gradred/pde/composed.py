"""The schemes of ``AcousticWave`` and ``Heat`` in TensorFlow's operations and halo exchanges.

What the native loops are tested against, and the way to derivatives of higher order and to changed
equations. Every step adds nodes to the graph: for few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import tensorflow as tf
from gradred.diff import HaloPlan, halo_exchange
from gradred.diff.node import operation
from gradred.pde.propagation import AcousticWave, Heat

__all__ = ["composed"]

_REFLECTION = 1e-4  # as in native/src/pde/acoustic.cpp


@operation
def composed(problem: AcousticWave | Heat, field: Any, signals: Any) -> tf.Tensor:
    """What ``problem(field, signals)`` returns. Collective; differentiable any number of times."""
    field = tf.convert_to_tensor(field, problem.dtype)
    sources = tf.convert_to_tensor(signals, problem.dtype) @ _places(problem, problem.sources)
    sources = tf.unstack(tf.reshape(sources, [problem.steps, *problem.grid.block_shape]))
    if isinstance(problem, AcousticWave):
        fields = _acoustic(problem, field, sources)
    else:
        fields = _heat(problem, field, sources)
    flat = tf.stack([tf.reshape(u, [-1]) for u in fields])
    receivers = _places(problem, problem.receivers)
    return tf.linalg.matmul(flat, receivers, transpose_b=True)


def _places(problem: AcousticWave | Heat, nodes: Sequence[tuple[int, int]]) -> tf.Tensor:
    """[nodes, nodes of the block]: one where a node is."""
    places = np.zeros((len(nodes), *problem.grid.block_shape))
    begins = [part.start for part in problem.grid.slices]
    for index, (node, own) in enumerate(zip(nodes, problem.owned(nodes), strict=True)):
        if own:
            places[index, node[0] - begins[0], node[1] - begins[1]] = 1.0
    return tf.constant(places.reshape(len(nodes), -1), problem.dtype)


def _shifted(padded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """The values before and behind each node along axis 0, then axis 1."""
    return padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]


def _acoustic(problem: AcousticWave, speed: tf.Tensor, sources: list[tf.Tensor]) -> list[tf.Tensor]:
    """Note [Acoustic step] of native/src/pde/kernels.h. The field after each step."""
    grid, dt = problem.grid, problem.dt
    h0, h1 = grid.spacing
    plan = HaloPlan(grid.context, grid.blocks, boundary="constant", corners=False)
    s = tf.constant(_damping(problem, 0)[:, None], problem.dtype)
    r = tf.constant(_damping(problem, 1)[None, :], problem.dtype)
    half = (s + r) * dt / 2
    k = dt**2 * tf.square(speed) / (1 + half)
    u = before = phi = psi = tf.zeros_like(speed)
    fields = []
    for source in sources:
        # As in the native loop: one message a neighbour.
        padded_u, padded_phi, padded_psi = halo_exchange([u, phi, psi], plan)
        up, down, left, right = _shifted(padded_u)
        phi_up, phi_down, _, _ = _shifted(padded_phi)
        _, _, psi_left, psi_right = _shifted(padded_psi)
        total = (up - 2 * u + down) / h0**2 + (left - 2 * u + right) / h1**2
        total += (phi_down - phi_up) / (2 * h0) + (psi_right - psi_left) / (2 * h1)
        after = ((2 - s * r * dt**2) * u - (1 - half) * before) / (1 + half) + k * total
        phi = (1 - s * dt) * phi + dt * (r - s) * (down - up) / (2 * h0)
        psi = (1 - r * dt) * psi + dt * (s - r) * (right - left) / (2 * h1)
        before, u = u, after + dt**2 / (1 + half) * source
        fields.append(u)
    return fields


def _damping(problem: AcousticWave, axis: int) -> np.ndarray:
    """Of this rank's nodes along an axis: quadratic in the layer."""
    part, nodes, layer = problem.grid.slices[axis], problem.grid.shape[axis], problem.layer
    if layer == 0:
        return np.zeros(part.stop - part.start)
    at = np.arange(part.start, part.stop)
    depth = np.maximum(np.maximum(layer - at, at - (nodes - 1 - layer)), 0) / layer
    thickness = layer * problem.grid.spacing[axis]
    strongest = -1.5 * problem.layer_speed * math.log(_REFLECTION) / thickness
    return np.asarray(strongest * depth**2)


def _heat(problem: Heat, conductivity: tf.Tensor, sources: list[tf.Tensor]) -> list[tf.Tensor]:
    """Note [Heat step] of native/src/pde/kernels.h. The field after each step."""
    grid, dt, k = problem.grid, problem.dt, conductivity
    plan = HaloPlan(grid.context, grid.blocks, boundary="constant", corners=False)
    edge = HaloPlan(grid.context, grid.blocks, boundary="symmetric", corners=False)
    faces = [(k + beyond) / 2 for beyond in _shifted(halo_exchange(k, edge))]
    squares = [grid.spacing[0] ** 2] * 2 + [grid.spacing[1] ** 2] * 2
    u = tf.zeros_like(k)
    fields = []
    for source in sources:
        flow = tf.zeros_like(k)
        for face, beyond, square in zip(
            faces, _shifted(halo_exchange(u, plan)), squares, strict=True
        ):
            flow += face * (beyond - u) / square
        u = u + dt * (flow + source)
        fields.append(u)
    return fields
