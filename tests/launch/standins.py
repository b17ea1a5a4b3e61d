"""Stand-ins for launchers: each records its line and starts ranks with the launcher's variables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# As the real ones do, it ends all ranks at once when one ends badly.
_TEXT = """#!{python} -S
import json, os, re, subprocess, sys, time
if sys.argv[1:] == ["--version"]:
    print({version!r})
    sys.exit()
words = sys.argv[1:]
command = words[words.index({python!r}):]
line = words[:len(words) - len(command)]
text = " ".join(line)
files = [open(word).read() for word in line if word.startswith("/")]
if os.environ.get("SLURM_HOSTFILE"):
    files.append(open(os.environ["SLURM_HOSTFILE"]).read())
json.dump([line, files], open({record!r}, "w"))
size = re.search(r"(?:-n|--ntasks|--nrs)[= ](\\d+)", text)
size = int(size[1]) if size else files[0].count("rank: ")
ranks = []
for rank in range(size):
    environ = dict(os.environ)
    for name, value in {variables!r}.items():
        environ[name] = value.format(rank=rank, size=size)
    ranks.append(subprocess.Popen(command, env=environ))
while True:
    codes = [rank.poll() for rank in ranks]
    if any(codes) or None not in codes:
        break
    time.sleep(0.01)
for rank in ranks:
    rank.terminate()
sys.exit(next((code % 256 for code in codes if code), 0))
"""


@dataclass(frozen=True)
class StandIn:
    program: str
    variables: Mapping[str, str]  # of a rank: {rank} and {size} are filled in
    version: str = ""
    options: tuple[str, ...] = ()  # of gradred run
    environ: Mapping[str, str] = field(default_factory=dict)  # around gradred run

    @property
    def rank_variable(self) -> str:
        return next(iter(self.variables))

    def write(self, folder: Path) -> Path:
        """The program; what it has recorded is read by ``recorded``."""
        path = folder / self.program
        text = _TEXT.format(
            python=sys.executable,
            version=self.version,
            record=str(folder / "record"),
            variables=dict(self.variables),
        )
        path.write_text(text)
        path.chmod(0o755)
        return path


def recorded(folder: Path) -> tuple[list[str], list[str]]:
    """The words in front of the command, and the texts of the files they name."""
    line, files = json.loads((folder / "record").read_text())
    return line, files


_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "{size}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
}
_HYDRA = {
    "PMI_RANK": "{rank}",
    "MPI_LOCALRANKID": "{rank}",
    "PMI_SIZE": "{size}",
    "MPI_LOCALNRANKS": "{size}",
}
_SLURM = {
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "{size}",
    "SLURM_STEP_TASKS_PER_NODE": "{size}(x1)",
}
_JSM = {
    "JSM_NAMESPACE_RANK": "{rank}",
    "JSM_NAMESPACE_LOCAL_RANK": "{rank}",
    "JSM_NAMESPACE_SIZE": "{size}",
    "JSM_NAMESPACE_LOCAL_SIZE": "{size}",
}
_LSF = {"LSB_MCPU_HOSTS": "batch1 1 node1 6"}

STAND_INS = {
    "Open MPI": StandIn(
        "mpiexec", _OPEN_MPI, "mpirun (Open MPI) 5.0.9", ("-H", "localhost:4", "--launcher-args=-q")
    ),
    "MPICH": StandIn(
        "mpirun", _HYDRA, "HYDRA build details:\n    Version:   4.2", ("-H", "localhost:4")
    ),
    "srun": StandIn("srun", _SLURM, options=("--cores", "2", "--gpus", "1")),
    "jsrun": StandIn("jsrun", _JSM, options=("--gpus", "1"), environ=_LSF),
    "jsrun, file": StandIn("jsrun", _JSM, options=("--resources", "file"), environ=_LSF),
}
LINES = {
    "Open MPI": "-n 3 --map-by slot:OVERSUBSCRIBE --bind-to none --host localhost:4 -q",
    "MPICH": "-n 3 -hosts localhost:4",
    "srun": "--ntasks=3 --mpi=MPI --cpus-per-task=2 --cpu-bind=cores --gpus-per-task=1 "
    "--gpu-bind=per_task:1 --kill-on-bad-exit=1 --export=ALL",
    "jsrun": "--nrs 3 --tasks_per_rs 1 --cpu_per_rs 2 --gpu_per_rs 1 --rs_per_host 3 "
    "--launch_distribution packed --bind rs",
    "jsrun, file": "--erf_input FILE",
}
