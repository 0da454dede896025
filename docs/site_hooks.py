"""What `mkdocs build` needs to take the pages as GitHub reads them: the top folder's pages, their links, and plain fences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: Files beside README.md that are on the site, and their names there.
TOP = {"README.md": "index.md", "README.zh.md": "README.zh.md", "CONTRIBUTING.md": "CONTRIBUTING.md",
       "CHANGELOG.md": "CHANGELOG.md", "LICENSE": "LICENSE.txt"}  # fmt: skip


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the top folder."""
    for name, on_site in TOP.items():
        files.append(File.generated(config, on_site, content=(ROOT / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as they are where everything is in one folder; no comments, which hide a table that follows; plain fences.

    What stands behind a fence's language is for the tests.
    """
    markdown = re.sub(r"\]\((?:docs/|\.\./)?([^):#]+)", lambda link: f"]({TOP.get(link[1], link[1])}", markdown)
    markdown = re.sub(r"^<!--.*?-->$", "", markdown, flags=re.M)
    return re.sub(r"^(```\w+) .*$", r"\1", markdown, flags=re.M)
