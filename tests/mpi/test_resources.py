"""What a job uses when it does nothing, and little when it does little. P2, P3, P6."""

from __future__ import annotations

import json

import pytest

SILENT = """
import json, resource, time
import numpy as np
import gradred as gr

def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)  # of all threads
    return usage.ru_utime + usage.ru_stime

gr.init()
gr.barrier()
idle = cpu_s()
time.sleep(3.0)
idle = cpu_s() - idle
for _ in range(10):
    gr.grouped_allreduce([np.ones(1), np.ones(1)], name="two")
rss = {line.split()[0]: int(line.split()[1]) for line in open("/proc/self/status") if "kB" in line}
used = gr.metrics().fusion_buffer_nbytes
waited = cpu_s()
if gr.rank() == 1:
    time.sleep(2.0)
gr.allreduce(np.ones(1), name="waits")  # rank 0: two seconds in a call
waited = cpu_s() - waited
print(json.dumps([idle, waited, used, rss["RssShmem:"]]))
"""


@pytest.mark.parametrize("launcher", ["gradred", "local"])
def test_silence_costs_nothing_and_small_tensors_little(run_ranks, launcher: str) -> None:
    result = run_ranks(2, SILENT, launcher=launcher)
    assert result.returncode == 0, result.text
    for out in result.out:
        idle_s, waited_s, fusion_nbytes, shared_kib = json.loads(out)
        assert idle_s < 0.06, result.text  # 2 % of a core
        assert waited_s < 0.06, result.text
        assert fusion_nbytes <= 64 << 10, result.text
        assert shared_kib < 8 << 10, result.text
