"""The pages of the documentation as values: their fenced blocks and the commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

from blocks.page import pages as every_page

ROOT = Path(__file__).resolve().parents[2]
#: Words after ```sh: why a block is only checked for commands and options that exist, not run.
NOT_RUN = {"gpu", "install", "remote", "slow"}
_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.S | re.M)
_HEREDOC = re.compile(r"<<'(\w+)'")


@dataclass(frozen=True)
class Fence:
    page: Path
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def exits(self):
        """Exit codes that are right."""
        codes = [word.removeprefix("exit=") for word in self.words if word.startswith("exit=")]
        return {int(code) for code in codes[0].split(",")} if codes else {0}

    @property
    def is_run(self):
        return self.language == "sh" and not NOT_RUN & set(self.words)


def fences(page, language=None):
    blocks = [Fence(page, kind, tuple(info.split()), text) for kind, info, text in _FENCE.findall(page.read_text("utf-8"))]
    return [fence for fence in blocks if language in (None, fence.language)]


def commands(text):
    """The commands of a block of shell, comments off; a here-document belongs to its command."""
    shell_commands, lines = [], iter(text.splitlines())
    for line in lines:
        heredoc = _HEREDOC.search(line)
        if heredoc:
            for more in lines:
                line += f"\n{more}"
                if more == heredoc[1]:
                    break
        elif not (line := re.sub(r"(^|\s+)# .*$", "", line).rstrip()):
            continue
        shell_commands.append(line)
    return shell_commands


def every_command(pages=None):
    """(page, fence, command) of every block of shell."""
    return [
        (page, fence, command) for page in pages or every_page() for fence in fences(page, "sh")
        for command in commands(fence.text)
    ]  # fmt: skip
