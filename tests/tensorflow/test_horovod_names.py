"""docs/horovod.md: every name of Horovod's is where it says, with those arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gradred.keras
import gradred.tensorflow
from gradred.errors import Unsupported

pytestmark = pytest.mark.smoke

_PAGE = Path(__file__).parents[2] / "docs" / "horovod.md"
_ROW = re.compile(
    r"^\| `(\w+)` \| (?:`(.*?)`|(none|not called)) \| (\w+) \| (.*) \|$", re.MULTILINE
)
_DEFAULTS = {
    "Average": gradred.tensorflow.Average,
    "global_process_set": gradred.tensorflow.global_process_set,
    "Compression.none": None,  # the setting GRADRED_WIRE
}


def rows() -> Iterator[Any]:
    """(module, name, arguments or None, verdict) of each row of the page."""
    for section in re.split(r"^## ", _PAGE.read_text(), flags=re.MULTILINE)[1:]:
        module = section.partition("\n")[0]
        if module.startswith("gradred."):
            found = list(_ROW.finditer(section))
            assert len(found) == section.count("\n| `"), f"{module}: a row that cannot be read"
            for row in found:
                name, arguments, word, verdict, _ = row.groups()
                text = None if word == "not called" else arguments or ""
                yield pytest.param(module, name, text, verdict, id=f"{module}.{name}")


def arguments_of(text: str) -> list[tuple[str, Any]]:
    """(name, default or Parameter.empty) of each positional argument of a row."""
    node = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    names = [a.arg for a in node.args.args]
    written = [ast.unparse(d) for d in node.args.defaults]
    defaults = [_DEFAULTS[d] if d in _DEFAULTS else ast.literal_eval(d) for d in written]
    required = [inspect.Parameter.empty] * (len(names) - len(defaults))
    return list(zip(names, [*required, *defaults], strict=True))


@pytest.mark.parametrize(("module", "name", "arguments", "verdict"), list(rows()))
def test_row(module: str, name: str, arguments: str | None, verdict: str) -> None:
    assert verdict in ("same", "better", "refused")
    home = importlib.import_module(module)
    assert name in home.__all__
    thing = getattr(home, name)
    if arguments is None:
        return
    expected = arguments_of(arguments)
    if verdict == "refused":
        with pytest.raises(Unsupported, match=name):
            thing(*[None for _, default in expected if default is inspect.Parameter.empty])
        return
    has = list(inspect.signature(thing).parameters.values())
    assert [(p.name, p.default) for p in has[: len(expected)]] == expected
    for more in has[len(expected) :]:
        optional = more.kind in (more.VAR_KEYWORD, more.VAR_POSITIONAL)
        assert optional or more.default is not more.empty, f"{more} has no default"


@pytest.mark.parametrize(
    "module", ["gradred.tensorflow", "gradred.tensorflow.keras", "gradred.keras"]
)
def test_every_name_is_on_the_page(module: str) -> None:
    home = importlib.import_module(module)
    text = _PAGE.read_text()
    missing = [name for name in home.__all__ if f"`{name}`" not in text]
    assert not missing
    for name in home.__all__:
        assert getattr(home, name) is not None


def test_names_of_keras() -> None:
    """Those that the page lists in a sentence."""
    sentence = (
        _PAGE.read_text().partition("\nand with the same meaning as in ")[2].partition(".\n")[0]
    )
    named = re.findall(r"`(\w+)`", sentence)
    assert len(named) > 25
    for name in named:
        assert getattr(gradred.keras, name) is getattr(gradred.tensorflow, name)
        assert name in gradred.keras.__all__


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("tensorflow.mpi_ops", "allreduce size rank global_process_set Average join init"),
        ("tensorflow.functions", "allgather_object broadcast_object broadcast_variables"),
        ("tensorflow.compression", "Compression Compressor"),
        ("tensorflow.keras", "callbacks elastic Compression init size DistributedOptimizer"),
        ("tensorflow.keras.callbacks", "MetricAverageCallback BroadcastGlobalVariablesCallback"),
        ("tensorflow.keras.elastic", "KerasState run"),
        ("common.process_sets", "ProcessSet global_process_set add_process_set"),
        ("tensorflow", "elastic"),
    ],
)
def test_other_paths(path: str, names: str) -> None:
    module = importlib.import_module(f"gradred.{path}")
    assert set(names.split()) <= set(dir(module))
