"""gradred.tensorflow under the path that its collectives have in Horovod."""

from __future__ import annotations

from gradred.tensorflow import *  # noqa: F403
from gradred.tensorflow import __all__ as __all__
