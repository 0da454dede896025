"""Commands killed at ten moments of what they do to files: each file is whole or not there, and the next command is as ever."""

import json
import subprocess
import sys

import pytest
from killed import forked, moments

from app.report import main as report_main
from finetune.cli import main
from finetune.files import write_json
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.state import process_record


@pytest.fixture
def work(home, kept_run, monkeypatch):
    """A folder with the run `finished`, apart from the caches."""
    folder = home / "work"
    kept_run(folder / "runs")
    monkeypatch.chdir(folder)
    return folder


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(*arguments):
    def call():
        sys.argv = ["finetune", *map(str, arguments)]
        return main()

    return call


def is_whole(path, content, reference):
    match path.suffix:
        case ".html":  # it has the time
            return content.endswith(b"</body></html>\n")
        case ".json":
            return bool(json.loads(content))
        case ".jsonl":  # of which each line counts, and a torn one is passed over
            return True
    return content == reference


def killed_at_ten_moments(work, call):
    """Kill it at each moment, look at what is there, and let the next one end. Returns its operations."""
    before = files_in(work)
    operations = forked(call, work)
    after = files_in(work)
    chosen = moments(operations)
    assert len(chosen) == min(10, len(operations))
    for moment in chosen:
        for path in files_in(work).keys() - before.keys():
            path.unlink()
        forked(call, work, moment)
        for path, content in files_in(work).items():
            assert path in before or path.name.startswith(".") or is_whole(path, content, after[path]), (moment, operations)
    for path in after.keys() - before.keys():
        path.unlink(missing_ok=True)
    forked(call, work)
    assert files_in(work).keys() == after.keys(), "the next one is whole, and what the killed ones left is gone"
    return operations


def report():
    """The process that `finetune report` starts."""
    sys.argv = ["report", "report.html", "runs/finished"]
    return report_main()


@pytest.mark.slow
@pytest.mark.parametrize("call", [command("recipes", "copy", "tiny-cpu"), report], ids=["recipe", "report"])
def test_a_written_file_is_whole_or_not_there(work, call):
    assert "c" in killed_at_ten_moments(work, call)


@pytest.fixture
def imported():
    """What takes seconds to import, and writes while it does, before there are forks."""
    import peft  # noqa: F401

    import finetune.evaluate.answerer
    import finetune.evaluate.score  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "finished", "--prompt", "a", "--max-new-tokens", "2"),
        ("serve", "finished", "--commands"),
        ("runs", "show", "finished", "--memory"),
        ("push", "finished", "alice/lora", "--dry-run"),
    ],
)
def test_a_command_that_only_looks_changes_nothing(work, imported, arguments):
    before = files_in(work)
    assert "c" not in forked(command(*arguments), work) and files_in(work) == before


def test_a_run_that_was_asked_to_stop_by_a_killed_command_stops_when_it_is_asked_again(work):
    run = RunDirectory(work / "runs" / "finished")
    for moment in range(len(asked(run, None)[0])):
        _, process = asked(run, moment)
        control.stop(run)
        assert process.wait() == -15


def asked(run, moment):
    """The operations of a request that is killed, and the process that it is for."""
    run.stop_requests.unlink(missing_ok=True)
    process = subprocess.Popen(["sleep", "600"])
    write_json(run.process, {"supervisor": process_record(process.pid)})
    return forked(lambda: not control.stop(run), run.path, moment), process
