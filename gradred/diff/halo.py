"""Halo exchange: the border layers of a rank's block to the ghost layers of its neighbours."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from gradred._native import core
from gradred.diff.context import Context
from gradred.diff.node import Node, adjoint_of, as_number, as_tensor, operation, run
from gradred.errors import InvalidArgument

__all__ = ["HaloPlan", "halo_exchange"]

_BOUNDARIES = {"periodic": 0, "constant": 1, "reflect": 2, "symmetric": 3}
_CONSTANT = 2  # where it is in the params of a plan


class HaloPlan:
    """Who gives which layers to whom. Local to make; equal arguments on all ranks.

    Attributes:
        block: shape of this rank's block; padded: of the block with its ghost layers.
    """

    context: Context
    block: tuple[int, ...]
    padded: tuple[int, ...]

    @operation
    def __init__(
        self,
        context: Context,
        blocks: Sequence[int | Sequence[int]],
        width: int | Sequence[int | tuple[int, int]] = 1,
        boundary: str | Sequence[str | tuple[str, str]] | None = None,
        *,
        constant: float = 0.0,
        corners: bool = True,
    ) -> None:
        """Plans exchanges between the blocks of a grid.

        context: its grid of ranks has 1 to 3 dimensions. blocks: of each dimension, the layers of
        each rank's block; or the layers of the whole grid, which are divided as by ``grid_blocks``.
        width: ghost layers, of all sides, of each dimension, or of each below and above.
        boundary: what ghost layers hold beyond the edge of the grid, of all sides, of each
        dimension, or of each below and above: "periodic": the layers of the other end; "constant":
        ``constant``; "reflect": mirrored at the outermost layer (c b | a b c); "symmetric":
        mirrored at the edge (b a | a b c). None: "periodic" where the context is, else
        "constant". corners: whether ghost points beyond several sides are exchanged too; without
        them, they are zero, and one round of messages serves all dimensions: for stencils that do
        not read them.

        Raises:
            InvalidArgument: a grid that does not fit the context's; a width beyond a block of the
                neighbour's, or, where it is mirrored, of the own; periodic on one side alone.
        """
        context.require_member("HaloPlan")
        dims = len(context.dims)
        self.context = context
        sizes = _each(blocks, dims, "blocks")
        widths = [_pair(w) for w in _each(width, dims, "width")]
        if boundary is None:
            boundary = ["periodic" if wrap else "constant" for wrap in context.periodic]
        ends = [_pair(b) for b in _each(boundary, dims, "boundary")]
        (bits,) = struct.unpack("<q", struct.pack("<d", constant))
        params = [context.rank, int(corners), bits, dims]
        for ranks, size, (low, high), sides in zip(context.dims, sizes, widths, ends, strict=True):
            if _is_one(size):
                size = as_number(size, "HaloPlan: blocks")
                size = [size // ranks + (i < size % ranks) for i in range(ranks)]
            if len(size) != ranks:
                raise InvalidArgument(
                    f"HaloPlan in context '{context.name}': {len(size)} blocks {list(size)} along "
                    f"a dimension of {ranks} ranks"
                )
            params += [as_number(w, "HaloPlan: width") for w in (low, high)]
            params += [_number(side) for side in sides]
            params += [ranks, *(as_number(layers, "HaloPlan: blocks") for layers in size)]
        self._params = tuple(params)
        plan = core.diff_halo_plan(self._params)
        self.block, self.padded = plan["interior"], plan["padded"]

    def _shape(self, x: tf.Tensor, axis: int) -> list[int | None]:
        shape: list[int | None] = x.shape.as_list()
        shape[axis : axis + len(self.padded)] = self.padded
        return shape


def _each(value: Any, dims: int, what: str) -> list[Any]:
    values = [value] * dims if _is_one(value) else list(value)
    if len(values) != dims:
        raise InvalidArgument(
            f"HaloPlan: {what}={value!r}: expected one for each of the {dims} dimensions"
        )
    return values


def _is_one(value: Any) -> bool:
    return isinstance(value, str) or not isinstance(value, Iterable)


def _pair(value: Any) -> tuple[Any, Any]:
    if _is_one(value):
        return value, value
    if len(value) != 2:
        raise InvalidArgument(f"HaloPlan: {value!r}: expected one for below and one for above")
    return tuple(value)


def _number(boundary: str) -> int:
    if boundary not in _BOUNDARIES:
        raise InvalidArgument(
            f"HaloPlan: boundary {boundary!r}: expected one of {', '.join(_BOUNDARIES)}"
        )
    return _BOUNDARIES[boundary]


@operation
def halo_exchange(x: Any, plan: HaloPlan, axis: int = 0, name: str | None = None) -> Any:
    """This rank's block with ghost layers around it. Collective; differentiable.

    x: a tensor of a floating dtype, [..., *plan.block, ...], or a list or tuple of them, whose
    dtypes and other dimensions may differ: all go to a neighbour in one message. axis: of the
    block's first dimension, from 0. Returns [..., *plan.padded, ...] of each. The adjoint adds the
    cotangents of ghost layers to the border layers that they came from, and drops those of
    constants.

    Raises: InvalidArgument: a tensor that does not hold the plan's block.
    """
    several = isinstance(x, list | tuple)
    fields = [as_tensor(field, "halo_exchange") for field in (x if several else [x])]
    dims = len(plan.block)
    axis = as_number(axis, "halo_exchange: axis")
    if axis < 0:
        raise InvalidArgument(f"halo_exchange: axis={axis}: expected a number from 0")
    for field in fields:
        got = field.shape[axis : axis + dims] if field.shape.rank is not None else None
        if got is not None and not got.is_compatible_with(plan.block):
            raise InvalidArgument(
                f"halo_exchange in context '{plan.context.name}': expected a block of shape "
                f"{plan.block} from axis {axis} on, got a tensor of shape {field.shape}"
            )
        if not field.dtype.is_floating:
            raise InvalidArgument(f"halo_exchange: expected a floating dtype, got {field.dtype}")
    params = (axis, *plan._params)
    padded = run(
        plan.context,
        "halo",
        fields,
        params=params,
        dtypes=[field.dtype for field in fields],
        shapes=[None if field.shape.rank is None else plan._shape(field, axis) for field in fields],
        name=name,
    )
    return type(x)(padded) if several else padded[0]


def _peers(node: Node) -> list[int]:
    plan = core.diff_halo_plan(node.params[1:])
    return sorted({*plan["peers"], *plan["adjoint_peers"]})


def _run(node: Node, operation: str, params: tuple[int, ...], xs: Any) -> list[tf.Tensor]:
    """The other direction: from what is like the outputs to what is like the inputs."""
    return run(
        node.context,
        operation,
        list(xs),
        params=params,
        dtypes=[x.dtype for x in xs],
        shapes=[x.shape for x in node.inputs],
    )


@adjoint_of("halo", "halo_adjoint", _peers)
def _adjoint(node: Node, *cotangents: tf.Tensor) -> list[tf.Tensor]:
    return _run(node, "halo_adjoint", node.params, cotangents)


@adjoint_of("halo_adjoint", "halo", _peers)
def _adjoint_of_adjoint(node: Node, *cotangents: tf.Tensor) -> list[tf.Tensor]:
    """The exchange without its constant: that of the linear part."""
    params = list(node.params)
    params[1 + _CONSTANT] = 0
    return _run(node, "halo", tuple(params), cotangents)
