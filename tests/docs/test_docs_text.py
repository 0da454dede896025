"""The pages name what exists: recipes, settings, commands, options, files and links; quick tables are up to date."""

import ast
import re
import shlex
import subprocess
from importlib.util import find_spec

import pytest
import typer.main
from blocks.page import block, blocks_of, cells, pages
from doc_pages import NOT_RUN, ROOT, commands, every_command, fences
from generate import DERIVED, QUICK, SLOW

import finetune
from finetune.cli.app import cli
from finetune.cli.source import recipe_of
from finetune.recipe import parse_recipe

PAGES = pages()
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
MINIMAL = "model_name_or_path: tiny\ndataset: {path: support}\n"
#: Programs of a block that is not run, besides finetune, python and make.
OTHERS = {"lm-eval", "uv", "pipx", "source", "ssh", "docker", ".venv/bin/python", ".venv/bin/ruff", ".venv/bin/mypy"}


def inline_code(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)
    text = re.sub(r"<!-- made by.*?<!-- end -->", "", text, flags=re.S)
    return re.findall(r"`([^`\n]+)`", text)


@by_name
def test_blocks_are_of_a_known_kind_recipes_are_recipes_and_python_names_what_the_library_has(page):
    generated = "".join(blocks_of(page.read_text("utf-8")).values())
    for fence in fences(page):
        assert fence.language in ("sh", "yaml", "console", "text", "python"), fence
        if fence.language == "console":  # what a command prints is never typed by hand
            assert fence.text in generated
        if fence.language == "sh":
            assert {word for word in fence.words if not word.startswith("exit=")} <= NOT_RUN, fence
        if fence.language == "yaml":
            parse_recipe(fence.text, page.name)
        if fence.language == "python":
            attributes = [node for node in ast.walk(ast.parse(fence.text)) if isinstance(node, ast.Attribute)]
            assert {node.attr for node in attributes if ast.unparse(node.value) == "finetune"} <= set(finetune.__all__)


def test_every_promise_names_a_test_that_exists():
    names = re.findall(r"`(tests/[\w/]+/test_\w+\.py)(?:::(\w+))?`", "".join(page.read_text("utf-8") for page in PAGES))
    assert len(names) > 20
    for path, function in names:
        assert f"def {function or 'test_'}" in (ROOT / path).read_text("utf-8"), (path, function)


@by_name
def test_links_lead_somewhere_and_files_in_the_text_exist(page):
    text = page.read_text("utf-8")
    headings = {f"#{title.lower().replace(' ', '-')}" for title in re.findall(r"^#+ (.+)$", text, re.M)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert target.startswith("https://") or target in headings or (page.parent / target).exists(), target
    for code in inline_code(page):
        if re.fullmatch(r"(finetune|app|benchmarks|docs|recipes|tests)/[\w./-]*", code):
            assert (ROOT / code).exists(), code


@by_name
def test_settings_in_the_text_are_taken_as_overrides(page):
    """Those of one kind of setting; what can't go together (FSDP on one card) is reported, and is no unknown setting."""
    overrides = [
        text for code in inline_code(page) for text in code.split() if re.fullmatch(r"(?!key=)[a-z][a-z_.\d]*=[\w.-]+", text)
    ]
    for text in overrides:
        with_cards = ["launch.num_processes=2", "launch.strategy=fsdp"] if text.startswith("launch.offload") else []
        with_cards = ["launch.num_processes=2"] if text.startswith("launch.strategy") else with_cards
        with_method = ["method=kto"] if text.startswith("loss_type=") else []
        parse_recipe(MINIMAL, overrides=[*with_cards, *with_method, text])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "fence", "command"), every_command(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_command_has_its_program_options_and_recipe(page, fence, command, monkeypatch, tmp_path, kept_run):
    if adapter := re.search(r" adapter=(\w+)", command):
        kept_run(tmp_path).rename(tmp_path / adapter[1])
        monkeypatch.chdir(tmp_path)
    for part in re.split(r"&&", command.splitlines()[0]):
        program, *arguments = shlex.split(part)
        if program == "finetune":
            check_finetune(arguments)
        elif program in ("python", ".venv/bin/python") and arguments[0] != "-m":
            assert (ROOT / arguments[0]).is_file()
        elif program.endswith("python") and not fence.is_run and program not in OTHERS:
            assert find_spec(arguments[1]), command
        elif program == "make":
            subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
        else:
            assert fence.is_run or program in OTHERS


def check_finetune(arguments):
    name, *options = arguments
    command = typer.main.get_command(cli).commands[name]
    params = command.make_context(name, options).params
    overrides = params.get("overrides") or []
    if name == "sweep":  # the first value of each list
        overrides = [text.partition(",")[0] for text in overrides]
    source = params.get("source")
    if {"source", "model"} <= params.keys() and name != "convert" and source and not source.startswith("path/to/"):
        recipe_of(source, overrides)


def test_both_readmes_have_the_same_commands_and_recipe():
    english, chinese = ROOT / "README.md", ROOT / "README.zh.md"
    assert [command for *_, command in every_command([english])] == [command for *_, command in every_command([chinese])]
    english_recipe, chinese_recipe = (parse_recipe(fences(page, "yaml")[0].text) for page in (english, chinese))
    assert english_recipe == chinese_recipe


def test_every_block_has_a_maker_every_maker_a_block_and_shell_is_split_into_commands():
    used = {name for page in PAGES for name in blocks_of(page.read_text("utf-8"))}
    assert used == {*QUICK, *SLOW, *DERIVED}
    text = "# alone\na  # why\ncat > x <<'EOF'\n# kept\nEOF\nb --c '#d'\n"
    assert commands(text) == ["a", "cat > x <<'EOF'\n# kept\nEOF", "b --c '#d'"]


@pytest.mark.parametrize("name", [*QUICK, *DERIVED])
def test_a_quick_table_is_up_to_date(name):
    block = {**QUICK, **DERIVED}[name]()
    for page in PAGES:
        assert blocks_of(page.read_text("utf-8")).get(name, block) == block, f"run: python docs/generate.py {name}"


def test_the_summary_of_errors_follows_from_the_rows_and_is_small():
    text = block("docs/accuracy.md", "accuracy")
    table, summary = text.strip().rsplit("\n\n", 1)
    errors = [float(row[-1].removesuffix(" %")) for row in cells(table)]
    count, mean, worst = re.fullmatch(r"(\d+) rows: mean \|error\| (\S+) %, worst (\S+) %\.", summary).groups()
    assert int(count) == len(errors) >= 20
    assert float(mean) == pytest.approx(sum(map(abs, errors)) / len(errors), abs=0.01)
    assert float(worst) == max(errors, key=abs)
    assert float(mean) <= 0.8 and abs(float(worst)) <= 2.5


def test_nothing_tells_to_install_the_other_project_called_finetune():
    command = re.compile(r"(?:pipx? install|uv tool install|uv add|uvx)(?: -\S+)* ['\"]?finetune(?!-forecast)\b")
    files = [*PAGES, ROOT / "Makefile", ROOT / "Dockerfile", *(ROOT / "finetune").rglob("*.py"), *(ROOT / "app").rglob("*.py")]
    assert [path for path in files if command.search(path.read_text("utf-8"))] == []
    assert command.search("uv tool install --quiet finetune") and not command.search("pip install finetune-forecast")
