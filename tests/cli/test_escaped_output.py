"""Names and values of files that others wrote never act on the terminal: control characters and overrides are shown escaped."""

import io
import json

import pytest
from rich.text import Text

from finetune.cli import render
from finetune.cli.output import print_json
from finetune.cli.render import SafeConsole, print_error, printable, show_progress, table
from finetune.errors import CommandError

HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\u202ed\x9be"
ACTING = "\x1b\x07\u202e\x9b"


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def screen(monkeypatch, request):
    """What the consoles print, without their own styles."""
    stream = io.StringIO()
    for name in ("out", "err"):
        console = SafeConsole(file=stream, force_terminal=request.param, color_system=None, width=200, highlight=False)
        monkeypatch.setattr(render, name, console)
    return stream


def print_table():
    rows = table(HOSTILE, "value", title=HOSTILE)
    rows.add_row(HOSTILE, "1")
    render.out.print(rows)


@pytest.mark.parametrize("show", [
    lambda: print_error(CommandError([HOSTILE, "second"], HOSTILE)), print_table,
    lambda: render.out.print(HOSTILE, soft_wrap=True), lambda: render.out.print(Text(HOSTILE)),
], ids=["error", "table", "line", "text"])  # fmt: skip
def test_text_of_others_is_escaped_whatever_prints_it(screen, show):
    show()
    assert "b" in screen.getvalue() and not set(ACTING) & set(screen.getvalue())
    assert r"\u202e" in screen.getvalue() and r"\x1b[2J" in screen.getvalue()


def test_a_spinning_message_is_escaped(screen):
    with show_progress(quiet=False) as report:
        report(HOSTILE)
        render.err.print("next")
    assert "\x1b[2J" not in screen.getvalue() and "\u202e" not in screen.getvalue()


def test_only_what_acts_is_escaped_and_json_has_the_same_values(capsys):
    assert printable("a\x1b[2J\x07\u202eb\u3000é\n") == "a\\x1b[2J\\x07\\u202eb\u3000é\n"
    print_json({HOSTILE: HOSTILE})
    text = capsys.readouterr().out
    assert not set(ACTING) & set(text) and json.loads(text) == {HOSTILE: HOSTILE}


@pytest.mark.parametrize("line", ['"\\e[2Jkey": 1', 'method: "\\e]0;x\\a"', 'method: "\\u202Edpo"'])
def test_a_recipes_keys_and_values_are_escaped(tmp_path, finetune, line):
    (tmp_path / "recipe.yaml").write_text(f"model_name_or_path: tiny\ndataset: support\n{line}\n")
    code, shown = finetune("plan", tmp_path / "recipe.yaml")
    assert code == 2 and not set(ACTING) & set(shown.err)
