"""``gradred doctor``: each line is tested by loading the thing in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from gradred.launch import mpirun

_LIMIT_S = 120.0
# Reduces over two ranks and says how they talked.
_REDUCE = """
import numpy as np, gradred
gradred.init()
assert gradred.size() == 2, f"the job has {gradred.size()} ranks, not 2"
total = gradred.allreduce(np.arange(5.0), op=gradred.Sum)
assert total.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0], total
if gradred.rank() == 0:
    print(gradred.describe())
gradred.shutdown()
"""
_SHARED_MEMORY = """
import os
file = os.memfd_create("gradred-doctor")
os.posix_fallocate(file, 0, 1 << 20)
space = os.statvfs("/dev/shm")
print(f"memfd; /dev/shm has {space.f_bavail * space.f_frsize / 1e9:.1f} GB")
"""
_LIBRARY = """
import ctypes, glob, sys
name = {name!r}
paths = [name, *glob.glob(sys.prefix + "/lib/python3*/site-packages/nvidia/*/lib/" + name)]
for path in paths:
    try:
        library = ctypes.CDLL(path)
        break
    except OSError as error:
        last = error
else:
    sys.exit(str(last))
version = ctypes.c_int()
assert getattr(library, {function!r})(ctypes.byref(version)) == 0, "{function} fails"
print(path, version.value)
"""
# What --version of a launcher says; horovodrun also has to have been built with MPI.
_LAUNCHER = """
import os, shutil, subprocess, sys
name = {name!r}
path = shutil.which(name, path=os.path.join(sys.prefix, "bin")) or shutil.which(name)
if path is None:
    sys.exit(name + " is not in this environment or on PATH")
def ask(option):
    done = subprocess.run([path, option], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit((done.stdout + done.stderr).strip() or f"{{path}} {{option}}: {{done.returncode}}")
    return (done.stdout.strip() or done.stderr.strip()).splitlines() or [""]
version = ask("--version")[0].strip()
if name == "horovodrun" and not any("[X] MPI" in line for line in ask("--check-build")):
    sys.exit(f"{{path}} {{version}} was built without MPI: it refuses --mpi")
print(path, version)
"""


@dataclass(frozen=True)
class Check:
    name: str
    command: list[str]
    # Whether gradred is broken without it here. An optional part that is not there is no fault.
    needed: bool


def _python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def _installed(module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run(_python(code), capture_output=True).returncode == 0


def checks(installed: Callable[[str], bool] = _installed) -> list[Check]:
    """What is tested on this machine, in the order of dependence."""
    tensorflow, mpi = installed("tensorflow"), mpirun.find_mpirun() is not None
    job = [sys.executable, "-m", "gradred.launch", "run", "-np", "2", "--no-tag", "--launcher"]
    version = "import {0}; print({0}.__version__)"
    return [
        Check("NumPy", _python(version.format("numpy")), True),
        Check("native part", _python("from gradred import _core; print(_core.__file__)"), True),
        Check("shared memory", _python(_SHARED_MEMORY), True),
        Check("2 ranks, no MPI", [*job, "local", *_python(_REDUCE)], True),
        Check("2 ranks, mpirun", [*job, "mpirun", *_python(_REDUCE)], mpi),
        *(
            Check(name, _python(_LAUNCHER.format(name=name)), False)
            for name in ("srun", "jsrun", "horovodrun")
        ),
        Check("mpi4py", _python("from mpi4py import MPI; print(MPI.Get_library_version())"), False),
        Check("TensorFlow", _python(version.format("tensorflow")), False),
        Check(
            "TensorFlow ops",
            _python("from gradred.tensorflow import native; print('loaded')"),
            tensorflow,
        ),
        Check("Keras", _python(version.format("keras")), False),
        Check(
            "NCCL", _python(_LIBRARY.format(name="libnccl.so.2", function="ncclGetVersion")), False
        ),
        Check(
            "CUDA driver",
            _python(_LIBRARY.format(name="libcuda.so.1", function="cuDriverGetVersion")),
            False,
        ),
    ]


def examine(check: Check) -> tuple[bool, str]:
    """Whether it works, and what it is or why it does not work."""
    environ = {**mpirun.clean_environment(os.environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            check.command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_LIMIT_S:g} s"
    lines = [
        line.strip() for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines()
    ]
    lines = [line for line in lines if line and not line.startswith("gradred run: the job")]
    if done.returncode == 0:
        return True, lines[-1] if lines else ""
    if done.returncode < 0:
        lines.append(f"ended by signal {-done.returncode}")
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return False, (errors or lines or [f"exit code {done.returncode}"])[-1]


def main() -> int:
    broken = 0
    for check in checks():
        works, text = examine(check)
        mark = "ok" if works else "BROKEN" if check.needed else "-"
        broken += not works and check.needed
        print(f"{mark:<7} {check.name:<16} {text}", flush=True)
    return 1 if broken else 0
