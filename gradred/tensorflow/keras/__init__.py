"""gradred.keras under the path that it has in Horovod."""

from __future__ import annotations

from gradred.keras import *  # noqa: F403
from gradred.keras import __all__ as __all__
