"""The pages of the documentation, the generated blocks on them, and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
_BLOCK = re.compile(r"<!-- made by docs/generate\.py: ([\w-]+) -->\n(.*?)<!-- end -->", re.S)


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(text: str) -> dict[str, str]:
    """Name -> content of each block on a page."""
    return dict(_BLOCK.findall(text))


def block(page: str, name: str) -> str:
    """The present content of a block on a page. Raises KeyError when there is none."""
    return blocks_of((ROOT / page).read_text(encoding="utf-8"))[name]


def replaced(text: str, blocks: dict[str, str]) -> str:
    """A page's text with the blocks in `made` replaced."""

    def one(match: re.Match[str]) -> str:
        name, old = match[1], match[2]
        return f"<!-- made by docs/generate.py: {name} -->\n{blocks.get(name, old)}<!-- end -->"

    return _BLOCK.sub(one, text)


def markdown(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table. A column whose name begins with `>` is right-aligned."""
    columns = list(columns)
    lines = [[column.removeprefix(">") for column in columns], ["--:" if column[:1] == ">" else "---" for column in columns]]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(table: str) -> list[list[str]]:
    """The rows of a table made by `markdown`, without the header."""
    return [re.split(r"(?<!\\) \| ", line[2:-2]) for line in table.splitlines()[2:]]
