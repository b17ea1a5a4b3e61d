"""gradred.keras.callbacks under the path that it has in Horovod."""

from __future__ import annotations

from gradred.keras.callbacks import *  # noqa: F403
from gradred.keras.callbacks import __all__ as __all__
