"""Solves with HYPRE, where the machine has it together with the Open MPI that it is linked to.

An MPI from PyPI cannot serve the system's HYPRE, so this starts a job of the system's.
"""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SIDE = 16  # unknowns along a side of a square
FEW = 25  # iterations of a preconditioned solve; without, some hundred


def find_system() -> tuple[str, str, str] | str:
    """HYPRE's library, the MPI that it is linked to, and its mpirun; or why there are none."""
    folders = [Path("/usr/lib"), Path("/usr/lib64"), *Path("/usr/lib").glob("*-linux-gnu")]
    found = [path for folder in folders for path in sorted(folder.glob("libHYPRE*.so*"))]
    if not found:
        return "no HYPRE in the system's folders (Debian: libhypre-dev)"
    linked = subprocess.run(["ldd", found[0]], capture_output=True, text=True, check=False).stdout
    mpi = re.search(r"libmpi\.so\S* => (\S+)", linked)
    if mpi is None:
        return f"{found[0]} is not linked to Open MPI"
    for name in ("mpirun.openmpi", "mpirun"):
        mpirun = shutil.which(name, path="/usr/bin:/usr/lib64/openmpi/bin")
        if mpirun is not None:
            version = subprocess.run([mpirun, "--version"], capture_output=True, text=True)
            if "Open MPI" in version.stdout:
                return str(found[0]), mpi[1], mpirun
    return f"no mpirun of {mpi[1]} (Debian: openmpi-bin)"


def check_solves(context, method, drift):
    """The solution and all gradients are those of a direct solver, after few iterations."""
    import numpy as np
    import scipy.sparse
    import scipy.sparse.linalg

    import tensorflow as tf
    from gradred import diff

    n = SIDE * SIDE
    at = np.arange(n).reshape(SIDE, SIDE)
    rates = np.exp(np.sin(at / 7.0))
    rows, columns, entries = [], [], []
    for a, b, c in (
        (at[1:], at[:-1], rates[1:]),
        (at[:, 1:], at[:, :-1], rates[:, 1:]),
    ):
        rows += [a, a, b, b]
        columns += [a, b, b, a]
        entries += [c, -c - drift, c, -c + drift]
    rows, columns, entries = (
        np.concatenate([x.ravel() for x in [*part, extra]])
        for part, extra in ((rows, at), (columns, at), (entries, 0.01 * rates))
    )
    mine = slice(context.rank, None, context.size)
    pattern = diff.sparse.Pattern(rows[mine], columns[mine], (n, n), context)
    a = scipy.sparse.csc_matrix((entries, (rows, columns)), shape=(n, n))
    right = np.cos(np.arange(n))
    own = slice(pattern.first_row, pattern.first_row + pattern.rows)
    t, b = tf.constant(entries[mine]), tf.constant(right[own])
    with tf.GradientTape() as tape:
        tape.watch([t, b])
        x, residuals = diff.sparse.solve(
            pattern,
            diff.sparse.assemble(pattern, t),
            b,
            method=method,
            preconditioner="boomeramg",
            rtol=1e-13,
            with_residuals=True,
        )
        loss = context.end(tf.reduce_sum(x**2))
    by_entries, by_right = tape.gradient(loss, [t, b])
    u = scipy.sparse.linalg.spsolve(a, right)
    adjoint = scipy.sparse.linalg.spsolve(a.T.tocsc(), 2 * u)
    size = abs(adjoint).max()
    np.testing.assert_allclose(x, u[own], rtol=0, atol=1e-9 * abs(u).max())
    np.testing.assert_allclose(by_right, adjoint[own], rtol=0, atol=1e-9 * size)
    wanted = -adjoint[rows[mine]] * u[columns[mine]]
    np.testing.assert_allclose(by_entries, wanted, rtol=0, atol=1e-9 * size * abs(u).max())
    assert len(residuals) <= FEW, residuals
    return pattern


def main() -> None:
    import gradred
    from gradred._native import core
    from gradred.diff import Context

    gradred.init()
    ranks = range(gradred.size())
    alone = [[r] for r in ranks]
    pairs = [[r, r + 1] for r in ranks[::2]]
    for groups in (alone, pairs, None):
        context = Context(groups)
        patterns, before = [], core.sparse_hierarchies()
        for _ in range(2):
            for method, drift in (("cg", 0.0), ("gmres", 0.0), ("gmres", 0.2), ("bicgstab", 0.2)):
                patterns.append(check_solves(context, method, drift))
                # Given up on each rank at another time and in another order.
                if len(patterns) > 2 + context.rank:
                    del patterns[-1 if context.rank % 2 else 0]
                    gc.collect()
        # The next one to be set up frees all that was given up on all ranks.
        patterns.clear()
        gc.collect()
        last = check_solves(context, "cg", 0.0)
        assert core.sparse_hierarchies() == before + 1
        del last
        context.close()  # which leaves that one
    print("all solved", gradred.size())
    gradred.shutdown()


def test_hypre(run_ranks):
    """On 1, 2 and 4 ranks, in groups of one job; symmetric and not; the adjoint too."""
    system = find_system()
    if isinstance(system, str):
        pytest.skip(system)
    hypre, mpi, mpirun = system
    root = Path(__file__).parents[2]
    job = run_ranks(
        4,
        Path(__file__),
        launcher=mpirun,
        env={
            "GRADRED_HYPRE_LIBRARY": hypre,
            "GRADRED_MPI_LIBRARY": mpi,
            "GRADRED_TRANSPORT": "mpi",
            "PYTHONPATH": f"{root}:{root / 'tests'}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        timeout=150,
    )
    assert job.returncode == 0 and all("all solved 4" in out for out in job.out), job.text


if __name__ == "__main__":
    main()
