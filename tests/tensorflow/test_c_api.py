"""The slice of TensorFlow's C API that is declared by hand."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import tensorflow as tf

_HERE = Path(__file__).parent


_COMPILERS = [*shlex.split(os.environ.get("CXX", ""))[:1], "c++", "g++", "clang++"]
_COMPILER = next(filter(None, map(shutil.which, _COMPILERS)), None)


@pytest.mark.smoke
@pytest.mark.skipif(_COMPILER is None, reason="needs a C++ compiler")
def test_declarations_are_those_of_the_headers():
    include = Path(tf.sysconfig.get_include())
    if not (include / "tensorflow/c/kernels.h").exists():
        pytest.skip("this TensorFlow comes without headers")
    command = [
        *(_COMPILER, "-std=c++17", "-fsyntax-only", "-I", str(include)),
        *("-I", str(_HERE.parents[1] / "native/tf"), str(_HERE / "c_api_check.cpp")),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
