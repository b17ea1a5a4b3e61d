"""What this package was built with and uses, by Horovod's names. Local."""

from __future__ import annotations

from gradred._native import core

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built(verbose: bool = False) -> bool:
    """Always: the MPI library is found at run time. ``verbose`` means nothing. Local."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is initialised in this process, by gradred or by others. Local."""
    return core.mpi_library() is not None


def mpi_threads_supported() -> bool:
    """Whether other threads may call MPI while gradred does. Local.

    That is so with MPI_THREAD_MULTIPLE; with MPI_THREAD_SERIALIZED gradred works, alone.

    Raises NotInitialized before ``init()``.
    """
    core.rank()
    return mpi_enabled() and not core.mpi_one_at_a_time()


def gloo_built(verbose: bool = False) -> bool:
    """Never: gradred starts local jobs without Gloo. ``verbose`` means nothing. Local."""
    return False


def gloo_enabled() -> bool:
    """Never. Local."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """0: tensors travel through host memory, not by NCCL. ``verbose`` means nothing. Local."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """Never. ``verbose`` means nothing. Local."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Never. ``verbose`` means nothing. Local."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Never: reductions run on the host. ``verbose`` means nothing. Local."""
    return False


def rocm_built(verbose: bool = False) -> bool:
    """Never: reductions run on the host. ``verbose`` means nothing. Local."""
    return False
