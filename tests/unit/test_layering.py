"""Who may include whom: the table of docs/design.md, checked on the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SRC = _ROOT / "native" / "src"

# Folder of native/src -> what its files may include besides their own folder.
_INTERFACES = {"base", "reduce", "comm"}
NATIVE = {
    "base": set(),
    "core": {"base"},
    "reduce": {"base"},
    "comm": {"base", "reduce"},
    "comm/loopback": _INTERFACES,
    "comm/shm": _INTERFACES,
    "comm/local": _INTERFACES,
    "comm/mpi": _INTERFACES,
    "comm/nccl": _INTERFACES,
    "engine": {"base", "core", "reduce", "comm"},
    "diff": _INTERFACES,
    "sparse": _INTERFACES | {"diff"},
    "pde": {"base", "comm", "diff"},
}
# The one place that knows the concrete transports and communicators.
REGISTRY = _SRC / "comm" / "world.cpp"

# Headers of others, and the only folders that include them.
OUTSIDE = {
    r"mpi\.h": (),
    r"Python\.h|pybind11/.*": ("native/bindings",),
    r"tensorflow/.*": ("native/tf_gpu",),
    r"nccl\.h|cuda.*\.h": ("native/tf_gpu",),
}

# Layers of the Python package: a module imports its own part and lower layers.
PYTHON_LAYERS = (
    {"errors", "config", "horovod_env", "plan_file", "reduce_ops"},
    {"_native", "_core"},
    {"neutral"},
    {"common"},
    {"tensorflow", "data"},
    {"keras", "diff"},
    {"pde"},
)
LAUNCH = {"launch", "config", "errors", "horovod_env", "plan_file"}  # what the command may import
_SHARED_LAYERS = 1  # up to this one, the parts of a layer may import each other
# Packages of others at the top of a module, and the parts that may import them so.
OUTSIDE_PYTHON = {
    "tensorflow": {"tensorflow", "keras", "diff", "pde"},
    "keras": {"tensorflow", "keras"},
    "mpi4py": set(),
    "numpy": {"neutral", "tensorflow", "keras", "diff", "pde", "data"},
}


def native_files() -> list[Path]:
    return [path for path in (_ROOT / "native").rglob("*") if path.suffix in (".h", ".cpp", ".cc")]


def includes(path: Path) -> Iterator[tuple[str, str]]:
    """(kind, what) of each include: kind is '"' or '<'."""
    text = path.read_text()
    yield from re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', text, re.MULTILINE)


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


@pytest.mark.parametrize("path", sorted(_SRC.rglob("*.[hc]*")), ids=lambda p: str(p.name))
def test_native_folders(path: Path) -> None:
    own = str(path.parent.relative_to(_SRC))
    assert own in NATIVE, f"folder {own} has no row in the table"
    allowed = NATIVE[own] | {own}
    if path == REGISTRY:
        allowed |= {folder for folder in NATIVE if folder.startswith("comm/")}
    for kind, name in includes(path):
        if kind == '"':
            assert (_SRC / name).exists(), f"{name}: paths start at native/src"
            assert folder_of(name) in allowed, f"{own} may not include {name}"


def test_outside_headers() -> None:
    for path in native_files():
        where = str(path.relative_to(_ROOT))
        for _, name in includes(path):
            for pattern, folders in OUTSIDE.items():
                if re.fullmatch(pattern, name):
                    assert where.startswith(folders) and folders, f"{where} includes {name}"


def part_of(path: Path) -> str:
    """The name in the tables for a Python file of the package."""
    parts = path.relative_to(_ROOT / "gradred").with_suffix("").parts
    if parts[:2] == ("tensorflow", "keras"):  # another path of gradred.keras
        return "keras"
    if len(parts) > 1:
        return parts[0]
    return parts[0] if parts[0] in PYTHON_LAYERS[0] | PYTHON_LAYERS[1] else "neutral"


def part_of_import(module: str) -> str:
    name = module.removeprefix("gradred").lstrip(".").partition(".")[0]
    file = _ROOT / "gradred" / f"{name}.py"
    if name == "_core":
        return name
    return part_of(file) if file.exists() or not name else name


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether it is imported with its file) of each import in a file."""
    tree = ast.parse(path.read_text())
    typing_only: set[ast.AST] = set()
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only.update(ast.walk(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in inner
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            if node.module == "gradred":
                for alias in node.names:
                    yield f"gradred.{alias.name}", node not in inner
            else:
                yield node.module, node not in inner


def layer_of(part: str) -> int:
    for number, parts in enumerate(PYTHON_LAYERS):
        if part in parts:
            return number
    raise AssertionError(f"{part} is in no layer of the table")


@pytest.mark.parametrize(
    "path",
    sorted((_ROOT / "gradred").rglob("*.py")),
    ids=lambda p: str(p.relative_to(_ROOT / "gradred")),
)
def test_python_layers(path: Path) -> None:
    part = part_of(path)
    for module, at_import in imports(path):
        top = module.partition(".")[0]
        if top == "gradred":
            other = part_of_import(module)
            if part == "launch":
                assert other in LAUNCH, f"launch imports {module}"
            elif other != part:
                below = layer_of(other) < layer_of(part)
                beside = layer_of(other) == layer_of(part) <= _SHARED_LAYERS
                assert below or beside, f"{part} may not import {module}"
        elif at_import and top in OUTSIDE_PYTHON:
            assert part in OUTSIDE_PYTHON[top], f"{part} imports {module} at its top"
