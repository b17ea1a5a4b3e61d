"""What keeps figures from their targets, and what was tried: kept beside them in result files.

Found on MACHINE, and kept in results from there alone. The note of a target has what its own run
counted and measured, on any machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["LIMITS", "MACHINE", "Limit", "find"]

MACHINE = {"cpu": "AMD EPYC", "cores": 2}


@dataclass(frozen=True)
class Limit:
    """Of the targets of a benchmark whose whole name matches the pattern."""

    benchmark: str
    pattern: str
    by: str
    tried: str  # without enough gain to stay


def find(benchmark: str, what: str) -> Limit | None:
    """The first row for a target."""
    for row in LIMITS:
        if row.benchmark == benchmark and re.fullmatch(row.pattern, what):
            return row
    return None


LIMITS = (
    Limit(
        "allreduce",
        r"16 bytes in a tf\.function",
        "Code that TensorFlow has driven out of the caches: on one rank a call takes 4 us again "
        "and again, and 20 after each run of a function. No other thread takes part in it.",
        "waiting without offering the core to others; -O2 in place of -O3 (0.6 us)",
    ),
    Limit(
        "allreduce",
        r"16 bytes after .* of silence.*",
        "What wakes slowly are TensorFlow's own threads: the same call without communication takes "
        "most of it.",
        "TF_NUM_INTEROP_THREADS=1 and 2: no faster",
    ),
    Limit(
        "allreduce",
        r".* 16 B, \d ranks: gradred over mpi",
        "A call that was made before takes about 1 us in Python and 4 in the engine, on slower "
        "cores three times that, where batch, round and group are objects of their own: one rank "
        "alone takes as long. Where ranks share a core each of them is also a switch of threads.",
        "a flag for each rank on a line of its own in place of counters, with and without a ring "
        "where nobody sleeps: no difference on 2 ranks",
    ),
    Limit(
        "allreduce",
        r".* 16 B, \d ranks: graph over tuned",
        "As of 16 bytes in a tf.function. Horovod's operation is one asynchronous kernel, whose "
        "thread polls every 0.1 ms; a call here is two kernels, of which the first is there to "
        "tell the others of failed steps.",
        "as of 16 bytes in a tf.function",
    ),
    Limit(
        "allreduce",
        r".* 64 KB, 4 ranks: gradred over mpi",
        "Ranks share cores: each hand-over between them is a switch of threads, and a call has "
        "two, the agreement and the sum.",
        "3, 64, 100 and 150 looks before a waiting rank sleeps, in place of 24",
    ),
    Limit(
        "allreduce",
        r".* (64 KB|1 MB), 2 ranks: gradred over mpi",
        "What a call takes on one rank alone, as of 16 bytes, is most of the difference.",
        "a flag for each rank on a line of its own in place of counters: no difference",
    ),
    Limit(
        "allreduce",
        r"b?float16 1 MB, 2 ranks: over the copy loop",
        "The call itself, as of 16 bytes, a quarter of the copy loop's time; and arithmetic: "
        "halves are summed in float32, which takes 24 us (bfloat16 37) for a rank's half of 1 MB "
        "where float32 takes 19, and the loop adds them as integers.",
        "packing past the caches, windows of 16 chunks, chunks of 64, 256 and 512 KiB",
    ),
    Limit(
        "allreduce",
        r".* (1|4) MB, \d ranks: over the copy loop",
        "Where cores share no cache, a core writes 2.3 GB/s to lines that it wrote last and "
        "another has read, 16 GB/s to lines that it was the last to read, 28 GB/s past the caches.",
        "with a shared cache: packing past the caches, windows of 16 chunks, chunks of 64, 256 and "
        "512 KiB, packing a rank's own part only when it is summed",
    ),
    Limit(
        "allreduce",
        r".* \d+ MB, 4 ranks: gradred over mpi",
        "Bytes and switches: what is added to the copy loop's time is hand-overs between ranks "
        "that share a core.",
        "3, 64, 100 and 150 looks before a waiting rank sleeps, in place of 24",
    ),
    Limit(
        "train",
        r"50 MB network: cost.*",
        "Ranks compute on all cores, so the counted bytes take their time from compute; nothing "
        "hides them where no core is spare. The rest is waiting for the slower rank: see what "
        "ranks that wait for each other lose without communication.",
        "one group, a group a tensor, equal counts, equal bytes, layers: overlap.json",
    ),
    Limit(
        "train",
        r"(dense|wide): step over tuned",
        "Both are bound by the counted bytes; the difference is within what jobs of one program "
        "differ by, which is 10 % for the dense network: see those without communication.",
        "one group, a group a tensor, equal counts, equal bytes, layers: overlap.json",
    ),
    Limit(
        "train",
        r"dense network: .*",
        "What ranks that wait for each other lose without communication, and the counted bytes, "
        "leave nothing of the 2 %.",
        "one wait for all gradients in place of one each",
    ),
    Limit(
        "overlap",
        r"auto over brute force, sleeping",
        "What is tried are cuts of a model of costs and plain ones of 1 and 4 MiB, not all; a "
        "trial is 8 steps, whose times scatter by some percent.",
        "GRADRED_PLAN_BATCHES=16: 0.96 in one run, beside another best of the brute force; runs "
        "differ by more than the limit",
    ),
    Limit(
        "hierarchical",
        r"2x2: hierarchical over flat",
        "Both are bound by the two cores, with a quarter of their time in TCP's copies.",
        "chunks of 1, 2 and 8 MB in place of 4: 0.66, 0.70, 0.64 beside 0.66 and 0.75",
    ),
    Limit(
        "timeline",
        r".*: (CPU )?on over off",
        "Two looks at the clock, 28 ns each, for each piece of 128 KiB that is packed, summed or "
        "unpacked, 2,500 a step of 53 MB; an event takes 0.1 to 0.2 us with its memory, and its "
        "line 0.3 us of the writer's thread on a core that is busy. A call of a tensor is 13 "
        "events. Blocks of one kind differ by some percent themselves.",
        "leaving out callbacks of less than 1 us; lines without std::string, and no phase of "
        "waiting for members where a group has one: 0.48 to 0.32 us a line, both kept",
    ),
)
