"""_core.pyi says what the native module has: names, and arguments by name and order."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from gradred import _core

STUB = ast.parse((Path(__file__).parents[2] / "gradred/_core.pyi").read_text())


def _stub_functions(body: list[ast.stmt]) -> dict[str, list[str]]:
    return {
        node.name: [a.arg for a in node.args.args if a.arg != "self"]
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def _native_arguments(function: object) -> list[str]:
    first = (inspect.getdoc(function) or "").splitlines()[0]
    inside = re.match(r"\w+\((.*)\) -> ", first)
    assert inside, first
    arguments = re.findall(r"(?:^|, )(\w+): ", inside.group(1))
    return [a for a in arguments if a != "self"]


def test_functions() -> None:
    stub = _stub_functions(STUB.body)
    native = {n: f for n, f in vars(_core).items() if inspect.isbuiltin(f)}
    assert set(stub) == set(native)
    for name, function in native.items():
        assert stub[name] == _native_arguments(function), name


def test_classes() -> None:
    stub = {n.name: _stub_functions(n.body) for n in STUB.body if isinstance(n, ast.ClassDef)}
    native = {n: c for n, c in vars(_core).items() if inspect.isclass(c)}
    assert set(stub) == set(native)
    for name, cls in native.items():
        methods = {n: m for n, m in vars(cls).items() if callable(m) and not n.startswith("_")}
        assert set(stub[name]) - {"__init__"} == set(methods)
        for method, function in methods.items():
            assert stub[name][method] == _native_arguments(function), method
