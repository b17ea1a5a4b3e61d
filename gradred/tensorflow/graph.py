"""What is read from TensorFlow's graphs while they are built."""

from __future__ import annotations

import collections
import os
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar, cast

from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs

import tensorflow as tf
from gradred.arrays import check_name
from gradred.errors import Unsupported
from gradred.process_sets import ProcessSet

__all__ = [
    "call_site",
    "domain_name",
    "of_session",
    "of_set",
    "outermost_graph",
    "plain_python",
    "ready_order",
    "refuse_xla",
    "run_independently",
    "runs_by_itself",
    "stack_level",
    "unique",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def plain_python(function: _Function) -> _Function:
    """AutoGraph, which rewrites what a tf.function calls, leaves the function as it is."""
    return cast(_Function, tf.autograph.experimental.do_not_convert(function))


# For each graph: how often a name was used in it.
_uses: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = weakref.WeakKeyDictionary()

_CONTROL_FLOW = (
    control_flow_v2_func_graphs.CondBranchFuncGraph,
    control_flow_v2_func_graphs.WhileCondFuncGraph,
    control_flow_v2_func_graphs.WhileBodyFuncGraph,
)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def ready_order(gradients: Sequence[Any]) -> list[int]:
    """The indices of the gradients, those that the backward pass produces first first.

    gradients: symbolic tensors, IndexedSlices or None (which come last, as do gradients made
    outside of the current graph). A gradient's place is the longest path from the graph's inputs to
    its producer, then the order of creation: the last layers' gradients come first.
    """
    count = len(gradients)
    graph = tf_ops.get_default_graph()
    places = _depths(graph)
    nowhere = (sys.maxsize, 0)

    def place(i: int) -> tuple[int, int, int]:
        gradient = gradients[i]
        if isinstance(gradient, tf.IndexedSlices):
            gradient = gradient.values
        depth, creation = nowhere
        if gradient is not None and gradient.graph is graph:
            depth, creation = places[gradient.op.name]
        return depth, creation, -i

    return sorted(range(count), key=place)


def _depths(graph: tf.Graph) -> dict[str, tuple[int, int]]:
    """Of each operation: length of the longest path of data to it, and its number."""
    places: dict[str, tuple[int, int]] = {}
    for number, op in enumerate(graph.get_operations()):
        # An input that was created later closes a loop: it does not count.
        depth = max((places.get(i.op.name, (0, 0))[0] for i in op.inputs), default=0)
        places[op.name] = (depth + 1, number)
    return places


def domain_name(kind: str, name: str | None, process_set: ProcessSet) -> str:
    """The name of a call's domain, alike on ranks that run the same program.

    kind: the operation. name: the user's, or None: then the line that calls, or in a graph the
    function that is traced. See ``unique``.

    Raises InvalidArgument for a process set that is not registered, and for what is no name.
    """
    if name is not None:
        check_name(name, kind)
    # A name that was given is without the kind: another operation under it has to meet this one.
    # In graphs not the line: AutoGraph runs generated files, whose names differ between ranks.
    if not name and tf.executing_eagerly():
        name = f"{kind}:{call_site()}"
    elif not name:
        name = f"{kind}:{_function_name()}"
    return unique(of_set(name, process_set))


def of_set(name: str, process_set: ProcessSet) -> str:
    """The name, for a process set: ranks that are in several count the calls of each apart."""
    number = process_set.require_id(name)
    return name if number == 0 else f"{name}@{number}"


def unique(name: str) -> str:
    """The name, with a number if calls in this graph have used it before.

    This graph: what is built at the moment, also a branch or the body of a loop. What is traced
    again begins anew, and functions do not count with what calls them, so that the number is alike
    on ranks that have traced different things before, or some twice. Equal names in one graph that
    runs are told apart there: Note [Instances] in native/tf/instances.h. Graphs of tf.compat.v1,
    which are built once, count as a whole.
    """
    if tf.executing_eagerly():
        return name
    graph = of_session() or tf_ops.get_default_graph()
    uses = _uses.setdefault(graph, collections.Counter())
    uses[name] += 1
    if uses[name] == 1:
        return name
    return unique(f"{name}.{uses[name] - 1}")  # which may have been used as it is


def of_session() -> tf.Graph | None:
    """The graph of tf.compat.v1 that is built, in functions the one that calls them; or None."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return None
    return outermost_graph()


def outermost_graph() -> tf.Graph:
    """The function that is traced, or the graph of tf.compat.v1, outside of loops and branches."""
    graph = tf_ops.get_default_graph()
    sessions = not tf.compat.v1.executing_eagerly_outside_functions()
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        # Outside of a function that eager mode calls is an empty graph that means nothing.
        if not (outer.building_function or sessions):
            break
        graph = outer
    return graph


def _function_name() -> str:
    """The innermost function that is traced, not a branch, loop or derivative of it."""
    graph = tf_ops.get_default_graph()
    while isinstance(graph, _CONTROL_FLOW) and graph.outer_graph is not None:
        graph = graph.outer_graph
    name = getattr(graph, "name", None) or "graph"
    while derived := re.fullmatch(r"__(?:forward|backward|inference)_(.+)_\d+", name):
        name = derived[1]
    return name


def call_site() -> str:
    """The line outside of gradred and TensorFlow that called, as "file.py:12".

    Without the folder: ranks may see the program under different paths.
    """
    frame, _ = _caller()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def stack_level() -> int:
    """That line's ``stacklevel`` for a warning of the function that asks."""
    return _caller()[1]


def _caller() -> tuple[FrameType, int]:
    """The frame outside of gradred and TensorFlow, and how far it is from the function that asks
    the one that calls this."""
    frame, level = sys._getframe(2), 1
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_PACKAGE) and f"{os.sep}tensorflow{os.sep}" not in path:
            break
        frame, level = frame.f_back, level + 1
    return frame, level


def runs_by_itself() -> bool:
    """Whether what is called runs without being asked for: eager mode, and tf.function."""
    return bool(tf.executing_eagerly() or tf_ops.get_default_graph().building_function)


def refuse_xla(what: str) -> None:
    """Raises Unsupported while a function with jit_compile=True is traced."""
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf_ops.get_default_graph()):
        raise Unsupported(
            f"{what} inside jit_compile=True: XLA cannot run it; compile the model and functions "
            "that reduce with jit_compile=False"
        )


def run_independently(op: Any) -> None:
    """Takes a stateful op out of automatic control dependencies.

    They would put it behind every stateful op that was traced before, so that no reduction began
    before the backward pass ended. Where TensorFlow lacks the call, results are right but late.
    """
    manager = getattr(op.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)
