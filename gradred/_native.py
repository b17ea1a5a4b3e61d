"""The native module, or an ImportError that says how to get it."""

from __future__ import annotations

try:
    from gradred import _core as core
except ImportError as error:
    raise ImportError(
        f"gradred's native module cannot be loaded ({error}). In a source tree, build and install "
        "it first: `make` there, or `pip install .`",
        name="gradred._core",
    ) from error

__all__ = ["core"]
