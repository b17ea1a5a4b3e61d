"""The command line of ``gradred``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from gradred.launch.errors import UsageError
from gradred.launch.hosts import parse_hosts, read_hostfile
from gradred.launch.launchers import NAMES, choose
from gradred.launch.plan import add_parser as add_plan
from gradred.launch.plan import main as plan
from gradred.launch.run import RunOptions, run
from gradred.launch.trace import add_parser as add_trace
from gradred.launch.trace import main as trace


class _Parser(argparse.ArgumentParser):
    """One line and exit code 2, without the usage text around it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _number_of(what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of {what} above 0")
        return int(text)

    return parse


def _launcher(text: str) -> str:
    if text not in NAMES and "/" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not {', '.join(NAMES)} or a path")
    return text


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "run",
        help="start a program on several ranks",
        usage="gradred run -np N [options] COMMAND [ARGS...]",
        description="Starts COMMAND on N ranks, shows their output with the rank in front, and "
        "ends the job as a whole. Returns the first exit code that is not 0, 128 + number for a "
        "signal.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", dest="size", type=_number_of("ranks"), metavar="N", help="ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="machines and their ranks")
    where.add_argument("--hostfile", metavar="FILE", help="lines HOST slots=N, or HOST:N")
    add(
        "--launcher",
        type=_launcher,
        default="auto",
        metavar="|".join((*NAMES, "PATH")),
        help="auto: mpirun where there is one, else local (one machine, no MPI); srun: in a job of "
        "Slurm; jsrun: in one of LSF; PATH of one of them",
    )
    add(
        "--launcher-args",
        type=_words,
        default=[],
        metavar="WORDS",
        help="further words of the launcher's line, as one argument",
    )
    add("--cores", type=_number_of("cores"), metavar="N", help="of each rank (srun, jsrun)")
    add("--gpus", type=_number_of("GPUs"), metavar="N", help="of each rank (srun, jsrun)")
    add(
        "--resources",
        choices=("sets", "file"),
        help="jsrun: numbers of resource sets (default), or a file with a line for each rank",
    )
    add(
        "--bind",
        choices=("core", "none"),
        default="core",
        help="core: an equal share of the cores for each rank, unless ranks outnumber cores",
    )
    add(
        "--tag-output",
        dest="tag",
        action="store_true",
        default=True,
        help="[rank] before each line (default)",
    )
    add("--no-tag", dest="tag", action="store_false", help="lines as they are")
    add(
        "-x",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable for the ranks; may be repeated",
    )
    add(
        "--timeout",
        type=_positive_seconds,
        metavar="S",
        help="end the job after S seconds (exit code 124)",
    )
    add(
        "--grace",
        type=_positive_seconds,
        default=5.0,
        metavar="S",
        help="from the end of a rank, or a signal, to the end of the others (default 5)",
    )
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="show the line that is run and how each rank ended",
    )
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=argparse.SUPPRESS)


def _parser() -> _Parser:
    parser = _Parser(
        prog="gradred", description="Gradient reduction over MPI ranks.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", parser_class=_Parser)
    _add_run(commands)
    commands.add_parser("info", help="versions, what was found and how, settings")
    commands.add_parser("doctor", help="load each part and say what does not work and why")
    add_plan(commands.add_parser("plan", help="read files of plans", allow_abbrev=False))
    add_trace(commands.add_parser("trace", help="read timelines", allow_abbrev=False))
    return parser


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """The checked options of ``gradred run``."""
    hosts = []
    if arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts)
    elif arguments.hostfile is not None:
        hosts = read_hostfile(arguments.hostfile)
    slots = sum(host.slots for host in hosts)
    size = arguments.size or slots
    if not size:
        raise UsageError("-np N, the number of ranks, is missing")
    if hosts and size > slots:
        raise UsageError(f"-np {size}: the hosts have {slots} slots")
    for option, value, kinds in (
        ("--cores", arguments.cores, ("srun", "jsrun")),
        ("--gpus", arguments.gpus, ("srun", "jsrun")),
        ("--resources", arguments.resources, ("jsrun",)),
        ("--launcher-args", arguments.launcher_args, ("mpirun", "srun", "jsrun")),
    ):
        if not value:
            continue
        launcher = choose(arguments.launcher, hosts)
        if launcher is None or launcher.kind not in kinds:
            raise UsageError(f"{option} needs --launcher {' or '.join(kinds)}")
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UsageError("the command to run is missing")
    if command[0].startswith("-"):
        raise UsageError(f"unknown option {command[0]}")
    variables: dict[str, str] = {}
    for text in arguments.variables:
        name, equals, value = text.partition("=")
        if not name:
            raise UsageError(f"-x {text!r}: expected NAME or NAME=VALUE")
        if not equals and name not in os.environ:
            raise UsageError(f"-x {name}: not set in this environment")
        variables[name] = value if equals else os.environ[name]
    return RunOptions(
        size=size,
        command=command,
        hosts=hosts,
        launcher=arguments.launcher,
        launcher_words=arguments.launcher_args,
        cores=arguments.cores,
        gpus=arguments.gpus or 0,
        resources=arguments.resources or "sets",
        bind=arguments.bind,
        tag=arguments.tag,
        variables=variables,
        timeout_s=arguments.timeout,
        grace_s=arguments.grace,
        verbose=arguments.verbose,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 2 for a command line that cannot be followed."""
    arguments_given = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    name = "gradred"
    try:
        arguments = parser.parse_args(arguments_given)
        if arguments.subcommand is None:
            parser.print_help()
            return 0
        name = f"gradred {arguments.subcommand}"
        if arguments.subcommand == "run":
            return run(run_options(arguments))
        if arguments.subcommand == "plan":
            return plan(arguments)
        if arguments.subcommand == "trace":
            return trace(arguments)
        if arguments.subcommand == "info":
            from gradred.launch.info import main as info

            return info()
        from gradred.launch.doctor import main as doctor

        return doctor()
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
