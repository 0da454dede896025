"""The main job with what Windows lacks taken away from our modules (stand_in/): train, stop, resume, queue, page."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import screenshots
from finetune.events import Start, Step, read_events
from finetune.run.directory import RunDirectory
from finetune.run.seal import newest_verified
from finetune.run.state import is_alive, read_state

STAND_IN = Path(__file__).parent / "stand_in"
TOKEN = "b" * 32
LAST_STEP = 20
LONG_S = 400
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, forecasts):
    """A folder of a user, with the cache where Windows has it."""
    folder = tmp_path_factory.mktemp("windows")
    (folder / "local" / "finetune").mkdir(parents=True)
    (folder / "local" / "finetune" / "forecasts").symlink_to(forecasts)
    return folder


def environment(folder):
    """As on Windows, files that are opened without an encoding are not UTF-8."""
    ours = {name: value for name, value in os.environ.items() if name not in ("FINETUNE_CACHE", "XDG_CACHE_HOME")}
    path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    changed = {"PYTHONPATH": path, "LOCALAPPDATA": str(folder / "local"), "FINETUNE_UI_TOKEN": TOKEN}
    return {**ours, **changed, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def python(folder, *arguments, code=0):
    process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment(folder))
    assert process.returncode == code, process.stdout[-2000:] + process.stderr[-2000:]
    return process.stdout


def wait_for(true, run=None):
    end = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < end, run.log.read_text("utf-8")[-2000:] if run else "nothing happened"
        time.sleep(0.1)


def starts(run):
    return [event.resumed_from for event in read_events(run.events) if isinstance(event, Start)]


def steps(run):
    return [event.step for event in read_events(run.events) if isinstance(event, Step)]


@pytest.fixture(scope="module")
def stopped(workspace):
    """A run that was started in the background and stopped after its first steps; and what `finetune pause` printed."""
    short = [f"max_steps={LAST_STEP}", "save_steps=10", "eval_steps=0", "lora_r=4", "lora_alpha=8", "dataloader_num_workers=1"]
    started = json.loads(python(workspace, "-m", "finetune", "run", "tiny-cpu", *short, "--detach", "--json"))
    run = RunDirectory(workspace / started["run"])
    wait_for(lambda: starts(run), run)  # its first step waits until a data loader is spawned, which takes longer than a stop
    return run, json.loads(python(workspace, "-m", "finetune", "pause", "latest", "--json"))


@pytest.fixture(scope="module")
def resumed(stopped, workspace):
    run, _ = stopped
    newest = newest_verified(run.checkpoints)[0].step
    return run, newest, python(workspace, "-m", "finetune", "resume", "latest", "--json")


@pytest.mark.parametrize("line", ["import fcntl", "import resource", "from os import fork", "from signal import SIGKILL"])
def test_our_modules_lack_what_windows_lacks_and_others_have_it(line, tmp_path):
    script = "import sys; exec(sys.argv[1], {'__name__': sys.argv[2], '__package__': sys.argv[2].rpartition('.')[0]})"
    python(tmp_path, "-c", script, line, "torch.nn")
    python(tmp_path, "-c", script, line, "finetune.run", code=1)


def test_a_stop_ends_the_run_after_its_step_with_a_checkpoint(stopped):
    run, outcome = stopped
    assert outcome["state"] == "paused" and outcome["exit_code"] == 143
    assert newest_verified(run.checkpoints)[0].step == steps(run)[-1] < LAST_STEP


def test_a_stopped_run_resumes_from_its_checkpoint_to_the_end(resumed):
    run, newest, output = resumed
    assert json.loads(output.splitlines()[-1])["state"] == "finished" and run.adapter.is_dir()
    assert starts(run) == [None, f"checkpoint-{newest}"]
    assert steps(run) == list(range(1, LAST_STEP + 1))


def test_its_processes_end_and_every_name_is_one_that_windows_takes(resumed, workspace):
    run = resumed[0]
    wait_for(lambda: not is_alive(run), run)
    assert not any(path.is_symlink() for path in run.path.rglob("*"))
    names = [path.name for folder in (run.path, workspace / "local/finetune") for path in folder.rglob("*")]
    assert "history.jsonl" in names  # the cache is used
    assert [name for name in names if re.search(r'[<>:"|?*\\]|[. ]$', name)] == []


def test_the_page_starts_a_run(workspace):
    code = (
        "from pathlib import Path; from app.background import start_run; from app.workspace import Workspace; "
        "from finetune.recipe import load_recipe; here = Path.cwd(); overrides = ['max_steps=2', 'eval_steps=0', "
        "'output_dir=queued/one']; start_run(Workspace(here, here / 'queued'), load_recipe('tiny-cpu', overrides))"
    )
    python(workspace, "-c", code)
    wait_for(lambda: list((workspace / "queued").glob("[!.]*/plan.json")))
    run = RunDirectory(next((workspace / "queued").glob("[!.]*/plan.json")).parent)
    wait_for(lambda: read_state(run).ended and run.process.exists(), run)
    assert read_state(run).state == "finished"


@pytest.mark.browser
def test_the_page_shows_the_run_and_plans(resumed, workspace):
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "finetune", "ui", "--port", "0"]
    page = subprocess.Popen(command, cwd=workspace, env=environment(workspace), stdout=subprocess.PIPE, text=True)
    try:
        link = re.search(r"(http://\S+)\?token=", page.stdout.readline())[1]
        with sync_playwright() as playwright:
            chromium = shutil.which("chromium") or shutil.which("chromium-browser")
            tab = playwright.chromium.launch(executable_path=chromium, args=screenshots.ARGUMENTS).new_page()
            tab.set_default_timeout(LONG_S * 1000)
            tab.goto(f"{link}runs?token={TOKEN}")
            tab.get_by_text(f"{LAST_STEP} of {LAST_STEP}").wait_for()
            tab.goto(link)
            tab.click("[data-panel=model]")
            tab.click("[data-key=tiny]")
            tab.wait_for_selector(".nr-verdict.ok")
    finally:
        for process in [*psutil.Process(page.pid).children(recursive=True), page]:
            process.kill()
        page.wait()
