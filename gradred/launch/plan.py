"""``gradred plan``: show, check and draw the files that ``gradred.save_plan`` writes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from gradred.errors import InvalidArgument
from gradred.launch.errors import UsageError
from gradred.plan_file import describe, groups, read


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``gradred plan``."""
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=type(parser)
    )
    show = actions.add_parser("show", help="groups, with their times", allow_abbrev=False)
    check = actions.add_parser(
        "check", help="whether files load; exit code 1 when not", allow_abbrev=False
    )
    draw = actions.add_parser("draw", help="the groups over time, as SVG", allow_abbrev=False)
    for action in (show, check):
        action.add_argument("files", nargs="+", metavar="FILE", help="what save_plan() wrote")
    draw.add_argument("file", metavar="FILE", help="what save_plan() wrote")
    draw.add_argument("-o", "--output", required=True, metavar="FILE", help="where to write")
    draw.add_argument("--domain", metavar="NAME", help="of this domain (default: the first)")


def main(arguments: argparse.Namespace) -> int:
    """Runs the action; returns the exit code."""
    if arguments.action == "check":
        return check(arguments.files)
    try:
        if arguments.action == "show":
            for path in arguments.files:
                domains = read(path)
                text = "".join(map(describe, domains.values()))
                print(text or f"{path}: holds no plan\n", end="")
        else:
            draw(arguments.file, arguments.domain, arguments.output)
    except InvalidArgument as error:
        raise UsageError(str(error)) from error
    return 0


def check(paths: Sequence[str]) -> int:
    """Prints a line a file."""
    code = 0
    for path in paths:
        try:
            domains = read(path)
            print(f"{path}: {len(domains)} domains")
        except InvalidArgument as error:
            print(error)
            code = 1
    return code


def draw(path: str, name: str | None, output: str) -> None:
    """Writes a picture of one domain."""
    domains = read(path)
    if not domains:
        raise UsageError(f"{path}: holds no plan")
    domain = domains.get(name) if name is not None else next(iter(domains.values()))
    if domain is None:
        raise UsageError(f"--domain {name}: {path} has {', '.join(domains)}")
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(svg(domain))
    except OSError as error:
        raise UsageError(f"-o {output}: {error.strerror}") from error


_WIDTH, _LEFT, _ROW, _BAR = 1000, 90, 40, 24
_COLORS = ("#4878a8", "#e0913c", "#5a9a5a", "#b85450", "#8a6fae", "#8c6d5a")


def svg(domain: dict[str, Any]) -> str:
    """When entries are ready (ticks) and groups run, as predicted and as measured."""
    times = [*domain["predicted_ns"], *domain["measured_ns"]]
    end = max([t for pair in times for t in pair] + domain["ready_ns"] + [1])
    scale = (_WIDTH - _LEFT - 20) / end

    def x(ns: int) -> str:
        return f"{_LEFT + ns * scale:.1f}"

    members = groups(domain)
    parts = [
        f'<text x="10" y="20">{escape(domain["domain"])}: {len(members)} groups, '
        f"{len(domain['labels'])} entries, to {end / 1e6:.3f} ms</text>"
    ]
    for row, label in enumerate(("ready", "predicted", "measured")):
        parts.append(f'<text x="10" y="{50 + row * _ROW + 16}">{label}</text>')
    for number, positions in enumerate(members):
        color = _COLORS[number % len(_COLORS)]
        nbytes = sum(domain["nbytes"][i] for i in positions)
        for i in positions if domain["ready_ns"] else ():
            at = x(domain["ready_ns"][i])
            parts.append(
                f'<line x1="{at}" x2="{at}" y1="50" y2="{50 + _BAR}" stroke="{color}">'
                f"<title>{escape(domain['labels'][i])}</title></line>"
            )
        for row, key in ((1, "predicted_ns"), (2, "measured_ns")):
            if not domain[key]:
                continue
            start, stop = domain[key][number]
            parts.append(
                f'<rect x="{x(start)}" y="{50 + row * _ROW}" height="{_BAR}" '
                f'width="{max(0.5, (stop - start) * scale):.1f}" fill="{color}">'
                f"<title>group {number}: {len(positions)} entries, {nbytes} bytes, "
                f"{start / 1e6:.3f} to {stop / 1e6:.3f} ms</title></rect>"
            )
    for k in range(11):
        ns = end * k // 10
        parts.append(f'<text x="{x(ns)}" y="190" text-anchor="middle">{ns / 1e6:.2f}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="200" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
