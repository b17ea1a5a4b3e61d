"""The documents say what the code says: settings, kinds of errors, links, who includes whom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradred import config, errors, horovod_env
from unit import test_layering

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_PAGES = sorted([*_ROOT.glob("*.md"), *_DOCS.glob("*.md"), *_ROOT.glob("examples/**/*.md")])


def headings(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)


def rows_of(page: Path, first_cell: str) -> list[str]:
    """The table rows of a page whose first cell fits the pattern."""
    return re.findall(rf"^\| {first_cell} \|.*$", page.read_text(), re.MULTILINE)


def settings_rows() -> Iterator[str]:
    """The rows of the table of settings, as docs/quickstart.md has them."""
    for variable, (setting, default) in config.table().items():
        value = int(default) if isinstance(default, bool) else default
        shown = "unset" if value == "" else f"{value:g}" if setting.kind == "float" else value
        yield f"| `{variable}` | {shown} | {setting.accepted} | {setting.scope} | {setting.text} |"


def test_settings_table() -> None:
    expected = list(settings_rows())
    found = rows_of(_DOCS / "quickstart.md", r"`GRADRED_\w+`")
    assert found == expected, "the table should be:\n" + "\n".join(expected)


def horovod_rows() -> Iterator[str]:
    """The rows of the table of Horovod's variables, as docs/launching.md has them."""
    settings = {
        variable: [name for name, theirs in horovod_env.sources().items() if variable in theirs]
        for variable in horovod_env.table()
    }
    for variable, row in horovod_env.table().items():
        ours = ", ".join(f"`{name}`" for name in settings[variable]) or "nothing"
        accepted = "any" if row.setting is None else row.setting.accepted
        yield f"| `{variable}` | {ours} | {accepted} | {row.text} |"


def test_table_of_horovods_variables() -> None:
    expected = list(horovod_rows())
    found = rows_of(_DOCS / "launching.md", r"`HOROVOD_\w+`")
    assert found == expected, "the table should be:\n" + "\n".join(expected)


def test_each_kind_of_error_has_its_section() -> None:
    kinds = set(errors.__all__) - {"Error", "HorovodInternalError"}
    sections = set(headings(_DOCS / "errors.md"))
    assert kinds <= sections, f"no section: {sorted(kinds - sections)}"


def test_layers_table() -> None:
    """docs/design.md has the table that test_layering.py checks, for the folders that exist."""
    native = _ROOT / "native" / "src"
    expected = {
        f"| `{folder}` | {', '.join(f'`{name}`' for name in sorted(allowed)) or 'nothing'} |"
        for folder, allowed in test_layering.NATIVE.items()
        if (native / folder).is_dir()
    }
    found = set(rows_of(_DOCS / "design.md", r"`[\w/]+`"))
    assert expected <= found, "missing:\n" + "\n".join(sorted(expected - found))


def anchor_of(heading: str) -> str:
    """As code hosts make them."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


@pytest.mark.parametrize("page", _PAGES, ids=lambda p: str(p.relative_to(_ROOT)))
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in map(anchor_of, headings(path)), f"{page.name}: {target}"


@pytest.mark.parametrize("page", _PAGES, ids=lambda p: str(p.relative_to(_ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Paths in backquotes that start with a folder of the repository."""
    folders = "native|gradred|tests|docs|examples|benchmarks"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*\w)`", page.read_text()):
        assert (_ROOT / name).exists(), f"{page.name}: {name}"
