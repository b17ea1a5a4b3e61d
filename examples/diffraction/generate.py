"""Simulate scanning diffraction patterns of random perovskite crystals.

Each sample is a scan of an electron probe over 8 x 8 positions: 64 patterns of 64 x 64 pixels,
stored as 16 * sqrt(intensity) in float16, and the projected potential of the scanned area, 64 x 64,
in float32 (V * Angstrom). The patterns come from a multislice simulation by abTEM (GPL-3.0) of
structures built with ASE (LGPL-2.1); both are external tools, installed by the extra ``examples``,
and no part of gradred.

Deterministic: structure ``s`` depends on ``--seed`` and ``s`` alone, whatever the number of ranks.
A structure belongs to one split, so that no test sample shares a crystal with a training sample.
Shards that exist are kept; one that is being written becomes visible only when it is complete.

    gradred run -np 2 python generate.py --out data --train 128 --test 32
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from dataset import SHARD_STRUCTURES, DataError, shard_is_complete, shard_path, write_shard
from progress import Progress

if TYPE_CHECKING:
    from ase import Atoms

A_SITES = ("Ca", "Sr", "Ba", "La", "Pb", "K", "Na")
B_SITES = ("Ti", "Zr", "Nb", "Mn", "Fe", "Al", "Sn", "Hf")
ANIONS = ("O", "F")
CELLS = 4  # unit cells along x and y
GRID = 128  # points of the simulated wave along x and y
SCAN = 8  # probe positions along x and y, over one quadrant of the crystal
PIXELS = 64
# A test structure's number starts here: no training set reaches it.
TEST_OFFSET = 1_000_000


def random_perovskite(rng: np.random.Generator) -> Atoms:
    """A crystal of 4 x 4 unit cells ABX3, 3 to 8 cells thick.

    Random are elements, mixing on the A site, lattice constants, the shift of the B site, the
    origin, vacancies and thermal displacements (0.06 Angstrom along each axis).
    """
    from ase import Atoms

    a = rng.uniform(3.75, 4.15)
    c = a * rng.uniform(0.98, 1.06)
    layers = int(rng.integers(3, 9))
    shift, angle = rng.uniform(0, 0.04) * a, rng.uniform(0, 2 * np.pi)
    a_site, a_site_2, b_site, anion = (rng.choice(s) for s in (A_SITES, A_SITES, B_SITES, ANIONS))
    mixing = rng.uniform(0, 0.5)
    origin = rng.uniform(0, 1, 2) * a
    symbols, positions = [], []
    for i, j, k in np.ndindex(CELLS, CELLS, layers):
        corner = np.array([i * a + origin[0], j * a + origin[1], k * c])
        if rng.random() > 0.04:
            symbols.append(a_site_2 if rng.random() < mixing else a_site)
            positions.append(corner)
        symbols.append(b_site)
        body = (a / 2 + shift * np.cos(angle), a / 2 + shift * np.sin(angle), c / 2)
        positions.append(corner + body)
        for face in ((a / 2, a / 2, 0), (a / 2, 0, c / 2), (0, a / 2, c / 2)):
            if rng.random() > 0.03:
                symbols.append(anion)
                positions.append(corner + face)
    displaced = np.array(positions) + rng.normal(0, 0.06, (len(positions), 3))
    atoms = Atoms(symbols, positions=displaced, cell=[CELLS * a, CELLS * a, layers * c], pbc=True)
    atoms.wrap()
    return atoms


def simulate(structure: int, seed: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Scan ``windows`` quadrants (1 to 4) of one structure.

    Returns patterns [windows, 64, 64, 64] float16 and potential [windows, 64, 64] float32.
    """
    import abtem

    atoms = random_perovskite(np.random.default_rng([seed, structure]))
    potential = abtem.Potential(
        atoms, gpts=GRID, slice_thickness=2.0, parametrization="lobato", projection="infinite"
    ).build(lazy=False)
    probe = abtem.Probe(energy=200e3, semiangle_cutoff=20.0)
    probe.grid.match(potential)
    half = atoms.cell.lengths()[0] / 2
    projected = np.asarray(potential.array).sum(0).astype(np.float32)
    patterns = np.zeros((windows, SCAN * SCAN, PIXELS, PIXELS), np.float16)
    targets = np.zeros((windows, PIXELS, PIXELS), np.float32)
    for w in range(windows):
        x, y = (w % 2) * half, (w // 2) * half
        scan = abtem.GridScan(start=(x, y), end=(x + half, y + half), gpts=SCAN, endpoint=False)
        measured = probe.scan(
            potential,
            scan=scan,
            detectors=abtem.PixelatedDetector(max_angle="valid"),
            max_batch=SCAN * SCAN,
            lazy=False,
        )
        intensity = np.asarray(measured.array).reshape(SCAN * SCAN, *measured.array.shape[-2:])
        patterns[w] = 16.0 * np.sqrt(np.maximum(centre(intensity, PIXELS), 0))
        i, j = (w % 2) * PIXELS, (w // 2) * PIXELS
        targets[w] = projected[i : i + PIXELS, j : j + PIXELS]
    return patterns, targets


def centre(images: np.ndarray, pixels: int) -> np.ndarray:
    """Crop or pad the last two axes around their centre to ``pixels``."""
    out = np.zeros((*images.shape[:-2], pixels, pixels), images.dtype)
    take = [min(n, pixels) for n in images.shape[-2:]]
    src = [(n - t) // 2 for n, t in zip(images.shape[-2:], take, strict=True)]
    dst = [(pixels - t) // 2 for t in take]
    out[..., dst[0] : dst[0] + take[0], dst[1] : dst[1] + take[1]] = images[
        ..., src[0] : src[0] + take[0], src[1] : src[1] + take[1]
    ]
    return out


def quiet_abtem() -> None:
    warnings.filterwarnings("ignore")
    import abtem
    import dask

    for key in ("local_diagnostics.progress_bar", "diagnostics.progress_bar"):
        abtem.config.set({key: False})
    abtem.config.set({"diagnostics.task_level_progress": False})
    dask.config.set(scheduler="synchronous")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder of the shards")
    parser.add_argument("--train", type=int, default=128, help="structures to train on")
    parser.add_argument("--test", type=int, default=32, help="structures to test on")
    parser.add_argument("--windows", type=int, default=4, help="quadrants of a structure, 1 to 4")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.train < 1 or args.test < 1:
        parser.error("--train and --test take at least 1 structure each")
    if args.train > TEST_OFFSET:
        parser.error(f"--train takes at most {TEST_OFFSET} structures")
    if not 1 <= args.windows <= 4:
        parser.error(f"--windows is 1 to 4, got {args.windows}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    import gradred

    gradred.init()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {args.out}: {error}") from error
    shards = [
        (split, k, range(k * SHARD_STRUCTURES, min((k + 1) * SHARD_STRUCTURES, n)))
        for split, n in (("train", args.train), ("test", args.test))
        for k in range((n + SHARD_STRUCTURES - 1) // SHARD_STRUCTURES)
    ]
    mine = [
        shard
        for shard in shards[gradred.rank() :: gradred.size()]
        if not shard_is_complete(shard_path(args.out, *shard[:2]), len(shard[2]), args)
    ]
    if mine:
        quiet_abtem()
    started = time.perf_counter()
    total = sum(len(numbers) for _, _, numbers in mine)
    bar = Progress("simulate", total, show=gradred.rank() == 0 and total > 0)
    for split, k, numbers in mine:
        offset = TEST_OFFSET if split == "test" else 0
        patterns, potentials = [], []
        for number in numbers:
            x, y = simulate(offset + number, args.seed, args.windows)
            patterns.append(x)
            potentials.append(y)
            bar.step()
        write_shard(
            shard_path(args.out, split, k),
            np.concatenate(patterns),
            np.concatenate(potentials),
            args,
        )
    bar.close()
    gradred.barrier()
    if gradred.rank() == 0:
        made = "nothing to do" if total == 0 else f"{time.perf_counter() - started:.0f} s"
        samples = (args.train + args.test) * args.windows
        print(f"{samples} samples in {len(shards)} shards in {args.out} ({made})")
    gradred.shutdown()


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"generate.py: {error}")
