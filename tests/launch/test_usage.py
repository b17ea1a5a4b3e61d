"""Command lines that cannot be followed: one clear line and exit code 2."""

from __future__ import annotations

import pytest

from gradred.launch import cli, mpirun


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run", "gradred run: -np N, the number of ranks, is missing"),
        ("run true", "gradred run: -np N, the number of ranks, is missing"),
        ("run -np 0 true", "'0' is no number of ranks above 0"),
        ("run -np -1 true", "-np"),
        ("run -np 100000 --launcher local true", "one machine gets at most 4096 ranks"),
        ("run -np two true", "'two' is no number of ranks above 0"),
        ("run -np", "-np"),
        ("run -np 2", "gradred run: the command to run is missing"),
        ("run -np 2 --", "gradred run: the command to run is missing"),
        ("run -np 1 --nonsense true", "--nonsense"),
        ("run --nonsense -np 1 true", "--nonsense"),
        ("run -np 1 no-such-program", "gradred run: command not found: no-such-program"),
        ("run -np 1 ./no/such/program", "gradred run: command not found: ./no/such/program"),
        (
            "run -np 1 --launcher slurm true",
            "'slurm' is not auto, mpirun, srun, jsrun, local or a path",
        ),
        ("run -np 1 --launcher /no/mpirun true", "/no/mpirun --version: "),
        ("run -np 1 --bind socket true", "'socket'"),
        ("run -np 1 --cores 0 true", "'0' is no number of cores above 0"),
        ("run -np 1 --cores 2 true", "--cores needs --launcher srun or jsrun"),
        ("run -np 1 --gpus 2 --launcher mpirun true", "--gpus needs --launcher srun or jsrun"),
        ("run -np 1 --resources file true", "--resources needs --launcher jsrun"),
        ("run -np 1 --launcher-args -v true", "--launcher-args"),
        (
            "run -np 1 --launcher local --launcher-args=-v true",
            "--launcher-args needs --launcher mpirun or srun",
        ),
        ("run -np 3 -H localhost:2 true", "gradred run: -np 3: the hosts have 2 slots"),
        ("run -H localhost:x true", "host 'localhost:x'"),
        ("run -np 1 --hostfile /no/file true", "--hostfile /no/file: "),
        ("run -np 1 -H a:1 --launcher local true", "--launcher local is for one machine; a is"),
        ("run -np 1 -x GRADRED_NOT_SET true", "gradred run: -x GRADRED_NOT_SET: not set"),
        ("run -np 1 -x =1 true", "-x '=1': expected NAME or NAME=VALUE"),
        ("run -np 1 --timeout -3 true", "--timeout"),
        ("run -np 1 --timeout soon true", "'soon' is no number of seconds above 0"),
        ("run -np 1 --grace 0 true", "'0' is no number of seconds above 0"),
        ("launch -np 2 true", "invalid choice: 'launch'"),
        ("--version-of-what", "--version-of-what"),
    ],
)
def test_one_line_and_exit_code_2(
    words: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("gradred") and err.count("\n") == 1 and err.endswith("\n")


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: None)
    assert cli.main(["run", "-np", "2", "--launcher", "mpirun", "true"]) == 2
    assert "no mpirun in this environment or on PATH" in capfd.readouterr().err
    assert cli.main(["run", "-H", "elsewhere:2", "true"]) == 2
    assert "several machines need mpirun" in capfd.readouterr().err


def test_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("run", "info", "doctor"))


def test_options_end_at_the_command() -> None:
    command = ["python", "-m", "mine", "-np", "7", "-x"]
    words = ["run", "-np", "2", "-v", "--no-tag", "-x", "A=b=c", "-x", "PATH", *command]
    arguments = cli._parser().parse_args(words)
    options = cli.run_options(arguments)
    assert options.size == 2 and options.verbose and not options.tag
    assert options.variables["A"] == "b=c" and "PATH" in options.variables
    assert options.command == command
    assert cli.run_options(cli._parser().parse_args(["run", "-H", "localhost:3", "a"])).size == 3
