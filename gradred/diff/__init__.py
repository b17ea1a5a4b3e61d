"""Communication as differentiable nodes of a TensorFlow graph. See docs/diff.md.

Each rank's gradient is the derivative of the sum of all ranks' losses by that rank's input: every
linear operation is the adjoint of its gradient in the product of all ranks' spaces. Gradients are
made of the same operations, so they can be differentiated again.
"""

from __future__ import annotations

from gradred.diff import sparse
from gradred.diff.allgather import allgather
from gradred.diff.allreduce import allreduce
from gradred.diff.alltoall import alltoall
from gradred.diff.barrier import barrier
from gradred.diff.broadcast import broadcast
from gradred.diff.check_replicated import check_replicated
from gradred.diff.context import Context
from gradred.diff.describe import describe
from gradred.diff.gather import gather
from gradred.diff.global_loss import global_loss
from gradred.diff.guard import guard
from gradred.diff.halo import HaloPlan, halo_exchange
from gradred.diff.psum import psum, replicate
from gradred.diff.reduce import reduce
from gradred.diff.reduce_scatter import reduce_scatter
from gradred.diff.repartition import grid_blocks, repartition
from gradred.diff.scan import scan
from gradred.diff.scatter import scatter
from gradred.diff.send import recv, send
from gradred.diff.sendrecv import sendrecv, shift

__all__ = [
    "Context",
    "HaloPlan",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "check_replicated",
    "describe",
    "gather",
    "global_loss",
    "grid_blocks",
    "guard",
    "halo_exchange",
    "psum",
    "recv",
    "reduce",
    "reduce_scatter",
    "repartition",
    "replicate",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "shift",
    "sparse",
]
