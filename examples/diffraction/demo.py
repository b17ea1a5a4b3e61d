"""The whole job: simulate, train, show; then float16 with an overflow. `make demo` runs it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("-np", type=int, default=2, help="ranks")
    parser.add_argument("--out", type=Path, default=Path("out/diffraction"))
    parser.add_argument("--train", type=int, default=96, help="structures, 4 samples each")
    parser.add_argument("--test", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    data = args.out / "data"
    steps = (
        ("generate.py", "--out", data, "--train", args.train, "--test", args.test),
        ("train.py", "--data", data, "--out", args.out, "--epochs", args.epochs),
        ("overflow.py",),
    )
    for script, *options in steps:
        command = [sys.executable, "-m", "gradred.launch", "run", "-np", args.np, "--no-tag"]
        command += [sys.executable, HERE / script, *options]
        code = subprocess.run([str(part) for part in command]).returncode
        if code != 0:
            print(f"demo.py: {script} ended with code {code}", file=sys.stderr)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
