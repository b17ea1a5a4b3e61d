"""Horovod's environment variables: what they stand for, what is rubbish, what means nothing."""

from __future__ import annotations

import pytest

from gradred import config, horovod_env
from gradred.errors import Mismatch

WITH_MEANING = [v for v, row in horovod_env.table().items() if row.has_meaning]
WITHOUT = [v for v, row in horovod_env.table().items() if not row.has_meaning]


def settings(**variables: str) -> config.Settings:
    """The settings under HOROVOD_<name> variables."""
    environ = {f"HOROVOD_{name}": value for name, value in variables.items()}
    translation = horovod_env.translate(environ)
    assert (translation.problem, translation.notes) == ("", [])
    return config.load(translation.environ)


def test_each_meaning() -> None:
    fused = settings(FUSION_THRESHOLD="1048576")
    assert (fused.group_bytes, fused.groups) == (1048576, "bytes")
    assert settings(FUSION_THRESHOLD="0").group_bytes == 1
    both = settings(FUSION_THRESHOLD="4096", AUTOTUNE="1")
    assert (both.group_bytes, both.groups) == (4096, "auto")
    assert settings(STALL_CHECK_TIME_SECONDS="3").stall_warn_seconds == 3
    assert settings(STALL_SHUTDOWN_TIME_SECONDS="6.5").stall_fail_seconds == 6.5
    off = settings(STALL_CHECK_DISABLE="1", STALL_CHECK_TIME_SECONDS="3")
    assert (off.stall_warn_seconds, off.stall_fail_seconds) == (0, 0)
    assert settings(STALL_CHECK_DISABLE="0").stall_warn_seconds == 60
    recorded = settings(TIMELINE="/tmp/t.json", TIMELINE_MARK_CYCLES="1")
    assert (recorded.timeline, recorded.timeline_mark_cycles) == ("/tmp/t.json", True)
    assert settings(TIMELINE="DYNAMIC").timeline == ""
    assert settings(LOG_LEVEL="TRACE").log_level == "debug"
    assert settings(LOG_LEVEL="fatal").log_level == "error"
    assert settings(MPI_THREADS_DISABLE="1").mpi_threads == "serialized"
    assert settings(MPI_THREADS_DISABLE="0").mpi_threads == "multiple"
    assert settings(THREAD_AFFINITY="0,1").thread_affinity == "0,1"


@pytest.mark.parametrize("variable", WITH_MEANING)
@pytest.mark.parametrize("raw", ["", "-1", "abc", " 1", "1e999"])
def test_rubbish_is_refused_with_name_and_range(variable: str, raw: str) -> None:
    translation = horovod_env.translate({variable: raw})
    setting = horovod_env.table()[variable].setting
    assert setting is not None
    if variable == "HOROVOD_TIMELINE" and raw:  # any name of a file
        assert translation.problem == ""
        return
    assert f"{variable}={raw!r}: expected {setting.accepted}" in translation.problem


def test_ours_go_first() -> None:
    translation = horovod_env.translate(
        {"HOROVOD_FUSION_THRESHOLD": "4096", "GRADRED_GROUP_BYTES": "8192"}
    )
    values = config.load(translation.environ)
    assert (values.group_bytes, values.groups) == (8192, "bytes")


@pytest.mark.parametrize("variable", WITHOUT)
def test_what_means_nothing_is_said_with_the_reason(variable: str) -> None:
    row = horovod_env.table()[variable]
    raw = next((raw for raw in ("1", "0", "GLOO") if not row.silent(raw)), None)
    if raw is None:  # what it asks for is so anyway
        assert horovod_env.translate({variable: "1"}).notes == []
        return
    translation = horovod_env.translate({variable: raw})
    assert translation.notes == [f"{variable}={raw} means nothing to gradred: {row.text}"]
    assert config.load(translation.environ) == config.Settings()


def test_what_is_so_anyway_is_not_said() -> None:
    environ = {
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_TORUS_ALLREDUCE": "0",
        "HOROVOD_ELASTIC": "0",
        "HOROVOD_RANK": "0",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_START_TIMEOUT": "30",
        "HOME": "/",
    }
    assert horovod_env.translate(environ).notes == []


def test_unknown_ones_name_the_nearest() -> None:
    notes = horovod_env.translate({"HOROVOD_FUSION_TRESHOLD": "1", "HOROVOD_QQQ": "1"}).notes
    assert notes[0].endswith("did you mean HOROVOD_FUSION_THRESHOLD?")
    assert notes[1] == "environment variable HOROVOD_QQQ is not known to gradred"


def test_ranks_that_differ_hear_of_both_names() -> None:
    texts = [
        config.job_text(config.load(horovod_env.translate(environ).environ), {})
        for environ in ({}, {"HOROVOD_MPI_THREADS_DISABLE": "1"})
    ]
    with pytest.raises(Mismatch) as caught:
        config.check_equal(texts, horovod_env.sources())
    assert (
        'GRADRED_MPI_THREADS (or HOROVOD_MPI_THREADS_DISABLE) is "multiple" on rank 0, '
        '"serialized" on rank 1' in str(caught.value)
    )
