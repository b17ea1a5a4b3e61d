"""gradred.compression under the path that it has in Horovod."""

from __future__ import annotations

from gradred.compression import Compression, Compressor

__all__ = ["Compression", "Compressor"]
