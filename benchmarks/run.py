"""All benchmarks, one after the other; results and pictures in benchmarks/results.

make bench                                     (with peers: some 40 minutes)
python benchmarks/run.py --quick --out out     (a few minutes, figures mean nothing)
python benchmarks/run.py --missed              (no run: the targets that the results do not reach)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

_HERE = Path(__file__).parent

# Name of the result and the line that makes it. Each takes up to three minutes: blocks are short,
# and there are as many as a median needs.
_LARGE = "65536,1048576,16777216,67108864"
RUNS = {
    "allreduce-2": "allreduce.py --ranks 2 --dtypes float32 --rounds 3 --silences 8"
    f" --sizes 16,{_LARGE},4194304",
    "allreduce-2-halves": "allreduce.py --ranks 2 --dtypes float16,bfloat16 --rounds 2 --silences 0"
    f" --contestants gradred,graph,tuned,hvd_gloo,torch,copy --sizes {_LARGE}",
    "allreduce-2-256mb": "allreduce.py --ranks 2 --dtypes float32 --rounds 2 --silences 0"
    " --contestants gradred,graph,mpi,tuned,hvd_gloo,torch,copy --sizes 268435456",
    "allreduce-4": "allreduce.py --ranks 4 --dtypes float32 --rounds 8 --silences 0"
    f" --contestants gradred,mpi,tuned,copy --sizes 16,{_LARGE},4194304",
    "negotiation": "negotiation.py --rank-counts 2,4 --names 1,100,10000 --rounds 1 --calls 30"
    " --idle-s 3",
    "overlap": "overlap.py --rounds 3 --iterations 6 --layers 7 --keep 6",
    # Apart: all modes in one run need more than 24 GB, most of it the peers'.
    "step": "step.py --rounds 3 --iterations 6 --modes grouped,tape",
    "step-each": "step.py --rounds 3 --iterations 6 --modes each",
    "train": "train.py --rounds 6",
    "algorithms": "algorithms.py --rounds 2",
    "hierarchical": "hierarchical.py --rounds 3",
    "memory": "memory.py",
    "timeline": "timeline.py",
    "pde_scaling": "pde_scaling.py --parts strong,weak --rounds 3 --iterations 3",
    "pde_scaling-poisson": "pde_scaling.py --parts poisson",
}


def show_missed(folder: Path) -> None:
    """Of each target that is not reached: value and limit, what limits it, what was tried."""
    for path in sorted(folder.glob("*.json")):
        for target in json.loads(path.read_text())["targets"]:
            if target["reached"]:
                continue
            figures = f"{target['value']:.4g}, limit {target['limit']:.4g} {target['unit']}".strip()
            print(f"{path.name}: {target['what']}: {figures}")
            for key in ("note", "limited_by", "tried"):
                text = f"{key.replace('_', ' ')}: {target.get(key) or '-'}"
                print(textwrap.indent(textwrap.fill(text, 96), "    "))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=_HERE / "results")
    parser.add_argument("--missed", action="store_true", help="show what results do not reach")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; none: all")
    options = parser.parse_args()
    if unknown := set(options.names) - set(RUNS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(RUNS)}")
    if options.missed:
        show_missed(options.out)
        return 0
    failed = []
    for name in options.names or RUNS:
        script, *words = RUNS[name].split()
        command = [sys.executable, str(_HERE / script), *words]
        command += ["--out", str(options.out / f"{name}.json")]
        command += ["--quick"] if options.quick else []
        print(f"\n=== {name}: {RUNS[name]}", flush=True)
        begun = time.monotonic()
        if subprocess.run(command).returncode != 0:
            failed.append(name)
        print(f"=== {name}: {time.monotonic() - begun:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
