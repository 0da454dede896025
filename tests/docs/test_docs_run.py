"""Every command of the pages is run, and a sample of what the program printed into them is printed again."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from blocks.page import block, cells, pages
from blocks.plans import MODELS, need_row, recipe_row
from doc_pages import ROOT, every_command
from generate import clean_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4000)]
#: The bundled model's trainings are cut to a few steps here; tests/cli runs the whole one. One that is stopped needs some more.
#: They don't evaluate, which takes most of the time: tests/cli and tests/methods do.
FINETUNE = """#!/bin/sh
case "$*" in
"run "*--detach*) set -- "$@" max_steps=30 ;;
"run "*) set -- "$@" max_steps=3 eval_steps=0 ;;
"eval "*) set -- "$@" --rows 4 ;;
esac
exec "$PYTHON" -m finetune "$@"
"""
#: A page's commands need what the pages before it have made.
ORDER = ["README.md", "first-fine-tune.md", "tour.md", "after-training.md", "scores.md", "preferences.md", "pretraining.md",
         "recipe.md", "other-tools.md", "memory.md", "larger-than-the-card.md", "out-of-memory.md", "many-cards.md", "fits.md",
         "sweeps.md", "models.md", "troubleshooting.md", "events.md", "plan-json.md", "library.md", "api.md", "security.md",
         "accuracy.md", "stand-in-gpu.md", "glossary.md", "CONTRIBUTING.md", "README.zh.md"]  # fmt: skip

#: Pages that plan large models and run nothing: test_docs_text.py parses their commands.
PLANS = {"larger-than-the-card.md", "out-of-memory.md", "fits.md", "many-cards.md"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, forecasts, warm_python):
    """A folder with a `finetune` on the path, and the commands that were run in it."""
    os.environ["PYTHON"] = warm_python
    folder = tmp_path_factory.mktemp("docs")
    (folder / "cache").mkdir()
    (folder / "cache" / "forecasts").symlink_to(forecasts)
    (folder / "bin").mkdir()
    (folder / "bin" / "finetune").write_text(FINETUNE)
    (folder / "bin" / "finetune").chmod(0o755)
    (folder / "work").mkdir()
    return folder, set()


def environment(folder):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "FINETUNE_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}


def pages_in_order():
    names = {page.name: page for page in pages()}
    assert sorted(names) == sorted(ORDER)
    return [pytest.param(names[name], marks=[pytest.mark.exhaustive] * (name in PLANS), id=name) for name in ORDER]


@pytest.mark.parametrize("page", pages_in_order())
def test_the_commands_of_a_page_run(workspace, page):
    folder, run_commands = workspace
    for _, fence, command in every_command([page]):
        if not fence.is_run or command in run_commands:
            continue
        run = serve if command.startswith("finetune ui") else execute
        run(folder, command, fence.exits)
        run_commands.add(command)


def execute(folder, command, exits):
    ended = subprocess.run(
        ["bash", "-c", command], cwd=folder / "work", env=environment(folder), capture_output=True, text=True
    )
    assert ended.returncode in exits, f"{command}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    assert "Traceback" not in ended.stderr
    if "--detach" in command:  # a person reads on when it trains
        events = folder / "work" / "runs" / "again" / "events.jsonl"
        while not (events.is_file() and '"kind": "step"' in events.read_text()):  # the time limit of the test ends this
            time.sleep(0.1)


def serve(folder, command, exits):
    """The page answers, and Ctrl-C ends it."""
    page = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder / "work", env=environment(folder), stdout=subprocess.PIPE, text=True
    )
    try:
        link = page.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{link.partition('?')[0]}healthz", timeout=300) as answer:
            assert answer.status == 200
        page.send_signal(signal.SIGINT)
        assert page.wait() in exits
    finally:
        page.kill()


@contextmanager
def without_this_machines_state(forecasts):
    before = dict(os.environ)
    try:
        with clean_state():
            cache = Path(os.environ["FINETUNE_CACHE"])
            cache.mkdir()
            (cache / "forecasts").symlink_to(forecasts)
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_plan_is_printed_as_on_the_page(forecasts):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import generate\n"
        "with generate.clean_state():\n"
        "    cache = os.environ['FINETUNE_CACHE']; os.mkdir(cache); os.symlink(sys.argv[2], f'{cache}/forecasts')\n"
        "    print(generate.plan_of('7b-4090 --why'), end='')"
    )
    command = [sys.executable, "-c", code, str(ROOT / "docs"), str(forecasts)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == block("docs/memory.md", "plan-7b-4090"), "run: python docs/generate.py"


def test_tables_of_what_fits_are_up_to_date(forecasts):
    """A sample; `python docs/generate.py --check` makes all rows."""
    planned = cells(block("docs/fits.md", "recipes"))
    needs = cells(block("docs/fits.md", "needs"))
    assert [row[0] for row in needs] == list(MODELS)
    with without_this_machines_state(forecasts):
        for row in [row for row in planned if "Qwen3." not in row[1]][::12]:  # without Triton these take the reference
            assert recipe_row(row[0].strip("`")) == row
        for row in needs[3::14]:
            assert need_row(row[0]) == row
