"""What is about to end this process: told to the other ranks, to ``gradred run``, and shown."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from types import TracebackType

# Errors that come of another rank's end, by their kinds; an op of TensorFlow has them in its text.
_CONSEQUENCES = ("Abandoned", "PeerLost")
# What an operation of gradred.diff raised on one rank has its kind on all: see diff/context.cpp.
_RAISED_BY = re.compile(r"(?:^|gradred \w+: )rank (\d+): .+ in context '")
# How much later a Ctrl-C that reaches all ranks may come to one of them.
_LATER_S = 0.3

_text = ""


def text() -> str:
    """The exception that ends this process, in one line; "" if none does. Local."""
    return _text


def watch() -> None:
    """Hooks for uncaught exceptions, once a process; all hooks that are set stay in effect.

    Under ``gradred run`` a Ctrl-C is shown by rank 0 in full, and by the others in one line: it may
    have come to all of them.
    """
    previous, previous_of_threads = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        global _text
        if hasattr(sys, "ps1"):  # an interactive session goes on
            previous(kind, value, tb)
            return
        interrupt = _interrupt(value)
        if interrupt is not None:
            kind, value, tb = type(interrupt), interrupt, interrupt.__traceback__
        _text = one_line(kind, value)
        rank = _tell_launcher(value)
        if interrupt is None or rank in ("", "0"):
            previous(kind, value, tb)
        else:
            print(f"KeyboardInterrupt at {_place(tb)}", file=sys.stderr, flush=True)

    def hook_of_threads(args: threading.ExceptHookArgs) -> None:
        global _text
        if not _text:
            where = args.thread.name if args.thread is not None else "?"
            _text = f"{one_line(args.exc_type, args.exc_value)} in thread {where}"
        previous_of_threads(args)

    sys.excepthook, threading.excepthook = hook, hook_of_threads


def is_consequence(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised for, is about another rank's end. Local."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kinds = {kind.__name__ for kind in type(error).__mro__}
        marks = [f"gradred {kind}: " for kind in _CONSEQUENCES]
        if kinds & set(_CONSEQUENCES) or any(mark in str(error) for mark in marks):
            return True
        raised_by, rank = _RAISED_BY.search(str(error)), os.environ.get("GRADRED_JOB_RANK", "")
        if raised_by is not None and rank and raised_by[1] != rank:
            return True
        error = error.__cause__ or error.__context__
    return False


def _place(tb: TracebackType | None) -> str:
    """File and line of the innermost frame of the program, not of a library or made by one."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(tb)]
    gradred = os.path.dirname(__file__) + os.sep
    libraries = (gradred, os.path.dirname(os.__file__) + os.sep, "<")
    own = [f for f in frames if not f[0].startswith(libraries) and "site-packages" not in f[0]]
    file, line = (own or frames[:1] or [("?", 0)])[-1]
    return f"{file}:{line}"


def _interrupt(error: BaseException) -> KeyboardInterrupt | None:
    """The Ctrl-C that ends this process, without what came to it as another rank's."""
    if not isinstance(error, KeyboardInterrupt):
        if "KeyboardInterrupt" not in str(error) or not is_consequence(error):
            return None
        try:  # the other rank's was perhaps ours as well, and only came there first
            time.sleep(_LATER_S)
            return None
        except KeyboardInterrupt:
            error = KeyboardInterrupt().with_traceback(error.__traceback__)
    if is_consequence(error.__context__):
        error.__context__ = None
    return error


def one_line(kind: type[BaseException], value: BaseException | None) -> str:
    """Kind and text of an exception, at most 1000 characters of them. Local."""
    lines = str(value or "").splitlines()
    if lines and lines[0].startswith("Graph execution error:"):
        # TensorFlow says first where each node came from, in many lines with a space in front.
        lines = [x for x in lines[1:] if not x[:1].isspace() and not x.endswith(" call last):")]
    words = " ".join(" ".join(lines).split())
    line = f"{kind.__name__}: {words}" if words else kind.__name__
    return as_utf8(line)[:1000]


def as_utf8(text: str) -> str:
    """A text that can be encoded: names of files need not be UTF-8. Local."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _tell_launcher(error: BaseException) -> str:
    """A note for ``gradred run``, see launch/run.py. Returns this rank, "" without a launcher."""
    folder, rank = os.environ.get("GRADRED_JOB_DIR"), os.environ.get("GRADRED_JOB_RANK", "")
    if not folder or not rank:
        return ""
    role = "consequence" if is_consequence(error) else "cause"
    path = f"{folder}/rank-{rank}.exception"
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        file.write(f"{role}\n{_text}\n")
    return rank
