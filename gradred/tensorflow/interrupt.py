"""KeyboardInterrupt where another rank's Ctrl-C ends an operation at the same moment."""

from __future__ import annotations

import signal
import threading

from gradred._native import core

# Note [Ctrl-C while an exception is made]
# A Ctrl-C that reaches all ranks comes to a rank that is in an operation of TensorFlow, which does
# not look for signals; the operation ends since a rank that was in Python has given up. TensorFlow
# then makes its exception, a class in Python, whose constructor is the first Python code to run
# since: there Python calls the handler, and what that raises replaces the exception. pybind11, in
# which TensorFlow makes it, takes this for a fault: "RuntimeError: MISMATCH of original and
# normalized active exception types", which no program expects. So the interrupt waits until the
# constructor is left.


def spare_constructors() -> None:
    """Puts Python's own handler of Ctrl-C off while an exception is made. Local.

    Another handler, also one that the program sets later, stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers there alone
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, core.interrupt)
