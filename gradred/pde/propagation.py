"""Propagation in time as one node of the graph: all steps of a scheme, with a hand-written adjoint.

The steps run in native code, on threads of this rank and with one exchange of borders a step
(native/src/pde). ``gradred.pde.composed`` writes the same schemes with TensorFlow's operations and
``gradred.diff``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from gradred._native import core
from gradred.diff.node import Node, adjoint_of, operation, run
from gradred.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from gradred.diff import Context
    from gradred.pde.grids import Grid

__all__ = ["AcousticWave", "Heat", "Traffic"]

Nodes = Sequence[tuple[int, int]]


class Traffic(NamedTuple):
    """Exchanges of borders: what this rank has sent, and for how long its steps were at it."""

    messages: int
    nbytes: int
    seconds: float


class _Propagation:
    """A time-dependent problem on a grid of two dimensions. Local to make.

    grid: of two dimensions. dt, steps: the time steps. sources, receivers: nodes (i, j) of the
    whole grid; a node may be named more than once. dtype: float32 or float64. threads: of this
    rank. keep: whether steps are kept for a gradient; without, calls are faster, and a gradient
    computes all steps again. memory_nbytes: what a rank may keep at most; more is recomputed from
    checkpoints, each step once at most. All but ``threads`` must be the same on all ranks.

    Raises InvalidArgument for nodes outside the grid and when ``memory_nbytes`` is too little for
    any choice of checkpoints.
    """

    _equation: str

    def __init__(
        self,
        grid: Grid,
        *,
        dt: float,
        steps: int,
        sources: Nodes,
        receivers: Nodes,
        dtype: Any = "float64",
        threads: int = 1,
        keep: bool = True,
        memory_nbytes: int = 1 << 31,
        layer: int = 0,
        layer_speed: float = 1.0,
    ) -> None:
        if len(grid.shape) != 2:
            raise InvalidArgument(
                f"{type(self).__name__}: expected a grid of 2 dimensions, got {len(grid.shape)}"
            )
        if not dt > 0 or threads < 1:
            raise InvalidArgument(
                f"{type(self).__name__}: dt and threads must be positive, got {dt} and {threads}"
            )
        if layer != 0 and not 4 <= layer <= (min(grid.shape) - 1) // 2:
            raise InvalidArgument(
                f"{type(self).__name__}: layer must be 0 or at least 4, and at most half of the "
                f"grid of {grid.shape} nodes, got {layer}"
            )
        self.grid, self.dt, self.steps = grid, float(dt), int(steps)
        self.dtype = tf.as_dtype(dtype)
        self.sources = [(int(i), int(j)) for i, j in sources]
        self.receivers = [(int(i), int(j)) for i, j in receivers]
        self.layer, self.layer_speed = layer, layer_speed
        self._keep = keep
        begins = [part.start for part in grid.slices]
        self._id = core.pde_open(
            equation=self._equation,
            dtype=self.dtype.name,
            shape=grid.shape,
            begin=begins,
            count=grid.block_shape,
            largest=[max(sizes) for sizes in grid.blocks],
            neighbours=[-1 if rank is None else rank for rank in _around(grid.context)],
            spacing=grid.spacing,
            dt=self.dt,
            steps=self.steps,
            sources=self.sources,
            receivers=self.receivers,
            layer=layer,
            layer_speed=layer_speed,
            threads=threads,
            memory_nbytes=memory_nbytes,
        )
        weakref.finalize(self, core.pde_close, self._id)

    @property
    def traffic(self) -> Traffic:
        """Of all steps so far: one message a neighbour and step. Local."""
        return Traffic(*core.pde_traffic(self._id))

    @property
    def steps_between_checkpoints(self) -> int:
        """How many steps a gradient recomputes at once; ``steps``: it recomputes none. Local."""
        return int(core.pde_keeping(self._id)[0])

    def owned(self, nodes: Nodes) -> list[bool]:
        """For each of the nodes, whether it lies in this rank's block. Local."""
        return [
            all(
                part.start <= at < part.stop
                for part, at in zip(self.grid.slices, node, strict=True)
            )
            for node in nodes
        ]

    def _run(self, coefficient: Any, signals: Any) -> tf.Tensor:
        inputs = [tf.convert_to_tensor(x, dtype=self.dtype) for x in (coefficient, signals)]
        records, _ = run(
            self.grid.context,
            "propagate",
            inputs,
            params=[self._id, self._keep],
            dtypes=[self.dtype, tf.int64],
            shapes=[(self.steps, len(self.receivers)), ()],
        )
        return records


def _around(context: Context) -> list[int | None]:
    """The ranks before and behind along axis 0, then axis 1; None beyond the grid.

    Also where the context is periodic: the field is zero there.
    """
    return [
        context.neighbour(dim, by)
        if 0 <= context.coordinates[dim] + by < context.dims[dim]
        else None
        for dim in (0, 1)
        for by in (-1, 1)
    ]


def _neighbours(node: Node) -> list[int]:
    return [rank for rank in _around(node.context) if rank is not None]


@adjoint_of("propagate", "propagate_adjoint", _neighbours)
def _adjoint(node: Node, records: tf.Tensor, _: Any) -> list[tf.Tensor]:
    coefficient, signals = node.inputs
    return run(
        node.context,
        "propagate_adjoint",
        [coefficient, signals, records, node.outputs[1]],
        params=node.params[:1],
        dtypes=[coefficient.dtype, signals.dtype],
        shapes=[coefficient.shape, signals.shape],
    )


@adjoint_of("propagate_adjoint", "", _neighbours)
def _second(node: Node, *_: Any) -> list[tf.Tensor]:
    raise Unsupported(
        "the gradient of a propagation cannot be differentiated again: use gradred.pde.composed, "
        "which can"
    )


class AcousticWave(_Propagation):
    """The acoustic wave equation u_tt = c^2 laplacian(u) + f, at rest at first.

    Central differences of second order in space and time on the nodes of the grid, u = 0 beyond
    them. ``layer`` nodes along every edge absorb waves (a perfectly matched layer: M. J. Grote and
    I. Sim, arXiv:1001.0319), none or at least 4, best for waves of speed ``layer_speed``. The rest
    as ``Heat``.
    """

    _equation = "acoustic"

    @operation
    def __call__(self, speed: Any, signals: Any) -> tf.Tensor:
        """Runs all steps. Collective over the grid's context, in its order; differentiable once.

        speed: c at the nodes of this rank's block, of its shape; length / time. signals: f at the
        sources, [steps, sources], time by time; those of other ranks' nodes are not read.

        Returns [steps, receivers], u after each step; zeros for receivers in other ranks' blocks,
        so the sum over the ranks is the whole. The cotangents of signals are likewise those of the
        own sources.

        Raises InvalidArgument, alike on all ranks, for tensors of other shapes, a speed that is not
        positive, and time steps that are too long for it: c dt sqrt(1/h0^2 + 1/h1^2) <= 1.
        """
        speed = tf.convert_to_tensor(speed, dtype=self.dtype)
        return self._run(speed * tf.abs(speed), signals)  # a negative one stays so, and is refused


class Heat(_Propagation):
    """Heat conduction u_t = div(k grad(u)) + f, u = 0 at first and beyond the grid.

    Explicit steps of first order in time, fluxes of second order in space, with k between two nodes
    the mean of theirs.
    """

    _equation = "heat"

    @operation
    def __call__(self, conductivity: Any, signals: Any) -> tf.Tensor:
        """Runs all steps. Collective over the grid's context, in its order; differentiable once.

        conductivity: k at the nodes of this rank's block, of its shape; length^2 / time. The rest
        as ``AcousticWave``, but for the time steps: 2 k dt (1/h0^2 + 1/h1^2) <= 1.
        """
        return self._run(conductivity, signals)
