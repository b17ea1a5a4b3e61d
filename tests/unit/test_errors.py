"""Exceptions: their kinds, and the package that is light and lazy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gradred
from gradred import errors, uncaught

ROOT = Path(__file__).parents[2]


def test_kinds_are_those_of_the_native_core() -> None:
    source = (ROOT / "native/src/base/status.cpp").read_text()
    native = set(re.findall(r'case Kind::k\w+:\s+return "(\w+)"', source)) - {"Ok"}
    assert native == set(errors.__all__) - {"Error", "HorovodInternalError"}
    for name in native:
        assert getattr(errors, name).kind == name
        assert getattr(gradred, name) is getattr(errors, name)


@pytest.mark.parametrize("name", sorted(set(errors.__all__)))
def test_all_are_runtime_errors(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.Error)
    assert issubclass(errors.Error, RuntimeError)


def test_errors_that_come_of_another_rank() -> None:
    """Told apart by kind, or in TensorFlow's text, also behind what a program raised for them."""
    lost = ValueError("the epoch failed")
    lost.__cause__ = errors.PeerLost("rank 1 ended")
    for error in (errors.Abandoned("x"), lost, OSError("[Op:X] gradred Abandoned: rank 1 gave up")):
        assert uncaught.is_consequence(error)
    for error in (errors.Mismatch("shapes"), ValueError("rank 1"), KeyboardInterrupt(), None):
        assert not uncaught.is_consequence(error)


def test_errors_of_operations_on_another_rank(monkeypatch) -> None:
    """Those of gradred.diff have the kind of the cause on all ranks, and its rank in the text."""
    text = "rank 1: halo in context 'c': no room"
    raised = (errors.InvalidArgument(text), OSError(f"[Op:X] gradred InvalidArgument: {text}"))
    for rank, told in (("0", True), ("1", False), ("", False)):
        monkeypatch.setenv("GRADRED_JOB_RANK", rank)
        assert [uncaught.is_consequence(error) for error in raised] == [told, told]


def test_one_line_of_an_exception() -> None:
    places = "Detected at node X defined at (most recent call last):\n  File 'a'\n\n"
    graph = RuntimeError(
        f"Graph execution error:\n\n{places}{places}it broke\n\t [[{{{{node X}}}}]]"
    )
    assert uncaught.one_line(RuntimeError, graph) == "RuntimeError: it broke"
    assert uncaught.one_line(KeyError, KeyError("a\nb")) == "KeyError: 'a\\nb'"
    assert uncaught.one_line(ValueError, ValueError("  a\n b")) == "ValueError: a b"
    name = os.fsdecode(b"\xff")
    assert uncaught.one_line(ValueError, ValueError(name)) == "ValueError: \\udcff"
    assert uncaught.one_line(KeyboardInterrupt, None) == "KeyboardInterrupt"
    assert len(uncaught.one_line(ValueError, ValueError("x" * 9999))) == 1000


def test_usage_errors_are_value_errors() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.NotInitialized, ValueError)
    assert issubclass(errors.Timeout, TimeoutError)


def test_horovods_names() -> None:
    from gradred.common.exceptions import (
        HorovodInternalError,
        HorovodVersionMismatchError,
        HostsUpdatedInterrupt,
    )

    failed = (errors.Abandoned, errors.PeerLost, errors.TransportError, errors.Timeout)
    assert all(issubclass(kind, HorovodInternalError) for kind in (*failed, errors.Internal))
    own = (errors.InvalidArgument, errors.Mismatch, errors.NotInitialized, errors.Unsupported)
    assert not any(issubclass(kind, HorovodInternalError) for kind in own)
    assert HorovodInternalError.kind == "Error"
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    error = HorovodVersionMismatchError("tensorflow", "2.21.0", "2.15.1")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == (
        *("tensorflow", "2.21.0"),
        "2.15.1",
    )


def _python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=60
    )


def test_import_loads_nothing() -> None:
    done = _python(
        """
        import sys
        before = set(sys.modules)
        import gradred, gradred.launch
        gradred.InvalidArgument
        heavy = {"numpy", "tensorflow", "mpi4py", "gradred._core", "keras"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        assert set(gradred.__all__) <= set(dir(gradred))
        """
    )
    assert done.returncode == 0, done.stderr


def test_without_native_module_says_how_to_build() -> None:
    done = _python(
        """
        import sys
        sys.modules["gradred._core"] = None
        import gradred, gradred.launch
        try:
            gradred.allreduce
        except ImportError as error:
            assert "pip install" in str(error), error
        else:
            raise AssertionError("no error")
        """
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists() -> None:
    for name in gradred.__all__:
        assert getattr(gradred, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        gradred.no_such_name  # noqa: B018


def test_version_is_that_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{gradred.__version__}"' in text
