"""Memory that fusing two tensors of 8 bytes takes.

python benchmarks/memory.py --out benchmarks/results/memory.json
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import contestants
from bench import chart
from bench.job import JobError, Jobs
from bench.measure import engine_threads
from bench.report import Report, Target, arguments, table

PEERS = {"gradred": {}, "horovod": {}}


def held() -> dict[str, int]:
    """Bytes of this process: resident, its address space, memory that it shares by file."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "VmSize"):
            found[key] = int(value.split()[0]) * 1024
    shared = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}"):
                status = os.stat(f"/proc/self/fd/{descriptor}")
                shared[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    found["shared"] = sum(shared.values())
    return found


def fuse(library: str) -> dict[str, Any]:
    """What grows while two tensors of 8 bytes are reduced together. Collective.

    Before, one tensor is reduced alone: buffers that every reduction needs are no part of it, but
    are told as ``before``.
    """
    import numpy as np

    with engine_threads():
        if library == "gradred":
            import gradred as hvd
        else:
            import horovod.tensorflow as hvd
        start = held()
        hvd.init()

    def reduce(count: int) -> None:
        tensors = [np.ones(2, np.float32) for _ in range(count)]
        if library == "gradred":
            hvd.grouped_allreduce(tensors, op=hvd.Sum, name=f"fuse.{count}")
        else:
            import tensorflow as tf

            hvd.grouped_allreduce([tf.constant(t) for t in tensors], op=hvd.Sum, name=f"f.{count}")

    reduce(1)
    before = held()
    for _ in range(20):
        reduce(2)
    after = held()
    counted = hvd.metrics().fusion_buffer_nbytes if library == "gradred" else 0
    return {
        "init": {key: before[key] - start[key] for key in start},
        "fused": {key: after[key] - before[key] for key in after},
        "counted": counted,
    }


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__.split("\n", 1)[0]).parse_args(argv)
    report = Report("memory", dict(vars(options)))
    rows = []
    bars = {}
    with Jobs() as jobs:
        for name, env in PEERS.items():
            if name == "horovod" and (options.quick or not contestants.available(name)):
                report.note("horovod: not installed here (make peers), or left out by --quick")
                continue
            jobs.start(name, options.ranks, env)
            try:
                with jobs.turn(name) as job:
                    found = job.call("memory.fuse", library=name)
            except JobError as error:
                report.note(f"{name}: {error}")
                continue
            for rank, figures in enumerate(found):
                report.rows.append({"contestant": name, "rank": rank, **figures})
            most = max(max(f["fused"]["VmRSS"], f["fused"]["shared"], f["counted"]) for f in found)
            space = max(f["fused"]["VmSize"] for f in found)
            first = max(f["init"]["VmRSS"] for f in found)
            rows.append([name, *(f"{n / 1e6:.2f} MB" for n in (most, space, first))])
            bars[name] = space / 1e6
            if name == "gradred":
                report.targets.append(Target("fusing two 8-byte tensors", most / 1e6, 1.0, "MB"))
    head = ["two tensors of 8 bytes, fused", "resident or held", "address space", "init and one"]
    print("\n" + table(head, rows))
    report.picture = chart.bars("address space taken to fuse two tensors of 8 bytes", "MB", bars)
    report.write(options.out)


if __name__ == "__main__":
    main()
