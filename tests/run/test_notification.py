"""A notification is sent when the recipe asks for it, with the program's own words where it fails; a run never fails for it."""

import json
import os

import pytest

from finetune.events import State, read_events
from finetune.recipe import load_recipe
from finetune.run.directory import RunDirectory
from finetune.run.notification import missing_notifier, notify
from finetune.run.state import read_state
from finetune.run.supervise import Supervisor

ENDED = State(state="finished", message="adapter in runs/one/adapter", exit_code=0)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program(name, status) -> what the program of that name was called with; it ends with the status."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def write(name, status=0):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nfor each; do echo "$each"; done > {path}.sent\necho no service >&2\nexit {status}\n')
        path.chmod(0o755)
        return lambda: path.with_suffix(".sent").read_text().splitlines()

    return write


def test_each_program_gets_the_run_and_its_final_state(program, tmp_path):
    desktop, apprise = program("notify-send"), program("apprise")
    assert notify("desktop", tmp_path / "--one", ENDED) == "" and notify("apprise", tmp_path / "one", ENDED) == ""
    assert desktop() == ["--app-name=finetune", "--", "--one: finished", "adapter in runs/one/adapter"]
    assert apprise() == ["--title=one: finished", "--body=adapter in runs/one/adapter"]
    assert notify("none", tmp_path, ENDED) == ""


def test_what_fails_or_is_missing_is_reported_and_nothing_is_raised(program, tmp_path, monkeypatch):
    program("apprise", 1)
    assert notify("apprise", tmp_path, ENDED) == "no notification was sent: apprise: no service"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "notify-send" in notify("desktop", tmp_path, ENDED)
    assert missing_notifier("apprise") == [] == missing_notifier("none")
    assert "pip install" not in missing_notifier("desktop")[0] and "libnotify" in missing_notifier("desktop")[0]


def test_a_recipe_chooses_it_and_has_no_address():
    assert load_recipe("tiny-cpu").notify == "none" and load_recipe("tiny-cpu", ["notify=apprise"]).notify == "apprise"
    with pytest.raises(Exception, match="notify"):
        load_recipe("tiny-cpu", [f"notify={json.dumps('mailto://me:secret@mail.example')}"])


def test_a_supervisor_sends_one_when_its_run_has_ended(kept_run, home, program):
    sent, run = program("apprise"), RunDirectory(kept_run(home))
    values = json.loads(run.plan.read_text())
    values["plan"]["notify"] = "apprise"
    run.plan.write_text(json.dumps(values))
    supervisor = Supervisor(run)
    supervisor.seen = [State(state="running"), ENDED]
    assert supervisor._notify(0) == 0 and sent()[0] == "--title=finished: finished"
    program("apprise", 1)
    assert supervisor._notify(7) == 7
    assert read_events(run.events)[-1].message == "no notification was sent: apprise: no service"
    assert read_state(run).state == "finished"
