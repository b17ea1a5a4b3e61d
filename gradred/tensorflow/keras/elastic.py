"""gradred.keras.elastic under the path that it has in Horovod."""

from __future__ import annotations

from gradred.keras.elastic import *  # noqa: F403
from gradred.keras.elastic import __all__ as __all__
