"""What programs with graphs and sessions of tf.compat.v1 broadcast."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gradred.errors import Unsupported
from gradred.tensorflow.functions import broadcast_variables

__all__ = ["BroadcastGlobalVariablesHook", "broadcast_global_variables"]


def broadcast_global_variables(root_rank: int) -> Any:
    """Gives all ranks the root's values of the graph's global variables. Collective when it runs.

    Returns: the operation that does it; None if there are no variables.

    Raises: Unsupported in eager mode, where there is no list of variables; InvalidArgument.
    """
    if tf.executing_eagerly():
        raise Unsupported(
            "broadcast_global_variables: expected a graph of tf.compat.v1, got eager mode; use "
            "broadcast_variables(model.variables, root_rank) there"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts the graph's global variables when a session begins, after they have values."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """root_rank: a rank of the world. device means nothing."""
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self._graph: tf.Graph | None = None

    def begin(self) -> None:
        """Adds the operation to the graph, before it is finalized. Local."""
        graph = tf.compat.v1.get_default_graph()
        if self._graph is not graph:
            self.bcast_op = broadcast_global_variables(self.root_rank)
            self._graph = graph

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Runs it. Collective."""
        if self.bcast_op is not None:
            session.run(self.bcast_op)
