"""Settings: strict parsing, unknown variables, comparison over ranks. No native code is needed."""

from __future__ import annotations

import pytest

from gradred import config
from gradred.errors import InvalidArgument, Mismatch

NUMBERS = [v for v, (row, _) in config.table().items() if row.kind in ("int", "float")]


def test_defaults() -> None:
    values = config.load({})
    assert values == config.Settings()
    assert values.stall_warn_seconds == 60
    assert values.stall_fail_seconds == 0
    assert values.transport == "auto"
    for variable, (row, default) in config.table().items():
        if default != "":  # unset: none
            raw = str(int(default)) if row.kind == "bool" else str(default)
            assert row.parse(variable, raw) == default


@pytest.mark.parametrize("variable", list(config.table()))
@pytest.mark.parametrize("raw", ["", "abc", "-1", " "])
def test_rubbish_is_refused(variable: str, raw: str) -> None:
    row = config.table()[variable][0]
    if row.kind == "text" and not row.pattern and raw.strip():
        assert row.parse(variable, raw) == raw
        return
    with pytest.raises(InvalidArgument) as caught:
        config.load({variable: raw})
    assert variable in str(caught.value)
    assert repr(raw) in str(caught.value)
    assert row.accepted in str(caught.value)


@pytest.mark.parametrize("variable", NUMBERS)
@pytest.mark.parametrize("raw", ["1_000", " 7", "7 ", "nan", "inf", "1e400", "0x10", "٣"])
def test_numbers_are_plain(variable: str, raw: str) -> None:
    with pytest.raises(InvalidArgument, match=variable):
        config.load({variable: raw})


def test_ranges() -> None:
    assert config.load({"GRADRED_CHUNK_BYTES": "4096"}).chunk_bytes == 4096
    with pytest.raises(InvalidArgument, match=r"GRADRED_CHUNK_BYTES='4095'.*from 4096 to"):
        config.load({"GRADRED_CHUNK_BYTES": "4095"})
    with pytest.raises(InvalidArgument, match="0 or 1"):
        config.load({"GRADRED_NULL": "yes"})
    assert config.load({"GRADRED_NULL": "1"}).null is True
    assert config.load({"GRADRED_STALL_FAIL_SECONDS": "6.5"}).stall_fail_seconds == 6.5


def test_ranges_are_printed_as_written() -> None:
    rows = {variable: row.accepted for variable, (row, _) in config.table().items()}
    assert rows["GRADRED_INIT_TIMEOUT_SECONDS"] == "a number from 0.1 to 100000000"
    assert rows["GRADRED_STALL_WARN_SECONDS"] == "a number from 0 to 100000000"
    assert rows["GRADRED_CHUNK_BYTES"] == "an integer from 4096 to 1099511627776"


def test_unknown_variables_name_the_nearest() -> None:
    lines = config.unknown_variables(
        {"GRADRED_TRANSPROT": "mpi", "GRADRED_QQQQ": "1", "GRADRED_INTRA": "shm", "HOME": "/"}
    )
    assert len(lines) == 2
    assert "GRADRED_QQQQ" in lines[0]
    assert "did you mean" not in lines[0]
    assert lines[1].endswith("did you mean GRADRED_TRANSPORT?")
    launcher = ["GRADRED_JOB", "GRADRED_JOB_DIR", "GRADRED_LOCAL_RANK", "GRADRED_LOCAL_SIZE"]
    assert config.unknown_variables(dict.fromkeys(launcher, "x")) == []


def test_equal_settings_pass_and_rank_settings_may_differ() -> None:
    a = config.job_text(config.load({"GRADRED_LOG_LEVEL": "debug"}), {"gradred": "1"})
    b = config.job_text(config.load({"GRADRED_STALL_WARN_SECONDS": "3"}), {"gradred": "1"})
    config.check_equal([a, b])


def test_different_settings_name_setting_values_and_ranks() -> None:
    usual = config.job_text(config.Settings(), {"gradred": "1"})
    other = config.job_text(
        config.load({"GRADRED_GROUP_BYTES": "1024", "GRADRED_WIRE": "float16"}), {"gradred": "2"}
    )
    with pytest.raises(Mismatch) as caught:
        config.check_equal([usual, other, usual, usual])
    text = str(caught.value)
    assert "GRADRED_GROUP_BYTES is 67108864 on ranks 0, 2, 3, 1024 on rank 1" in text
    assert 'GRADRED_WIRE is "none" on ranks 0, 2, 3, "float16" on rank 1' in text
    assert 'gradred is "1" on ranks 0, 2, 3, "2" on rank 1' in text
    assert "GRADRED_INTRA" not in text


def test_many_ranks_are_not_all_listed() -> None:
    usual = config.job_text(config.Settings(), {})
    other = config.job_text(config.load({"GRADRED_NULL": "1"}), {})
    with pytest.raises(Mismatch, match=r"ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"):
        config.check_equal([usual] * 1000 + [other])


def test_rubbish_leaves_the_default() -> None:
    values, problem = config.load_valid({"GRADRED_NULL": "maybe", "GRADRED_WIRE": "float16"})
    assert values.null is False
    assert values.wire == "float16"
    assert problem.startswith("GRADRED_NULL='maybe': ")
