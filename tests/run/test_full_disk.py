"""A disk that is really full, a small tmpfs, wherever something is written: nothing is lost, and it continues after freeing."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import adapter_hash, started_to

from finetune.errors import DiskFull, is_disk_full
from finetune.events import EventWriter, RunWarning, State, read_events
from finetune.export.merge import merge
from finetune.files import write_json
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.seal import newest_verified
from finetune.run.state import read_state

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_starts")]


@pytest.fixture
def disk(tmp_path):
    """A tmpfs of 24 MB: room for a run and some of its checkpoints. Needs the right to mount."""
    mount = tmp_path / "disk"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {mounted.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(folder, leave=0, name="ballast"):
    """Fill the disk but for `leave` bytes; returns the file to remove."""
    ballast = folder / name
    with ballast.open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        file.truncate(max(0, file.tell() - leave))
    return ballast


@pytest.fixture(scope="module")
def finished(make_run, train):
    return train.whole(make_run())


def on_disk(run, folder):
    subprocess.run(["cp", "-r", str(run.path), str(folder / "run")], check=True)
    return RunDirectory(folder / "run")


@pytest.mark.parametrize("at_step, leave", [(2, 0), (3, 200_000)])
def test_training_pauses_at_whatever_write_fails_and_continues_to_the_same_adapter(
    make_run, finished, train, tmp_path, disk, at_step, leave
):
    run, filled = on_disk(make_run(), disk), tmp_path / "filled"
    pid = started_to(train, run, at_step, filled)
    ballast = fill(disk, leave)
    filled.touch()
    assert train.wait(pid) == 7, run.log.read_text()[-2000:]
    ballast.unlink()
    good, skipped = newest_verified(run.checkpoints)
    assert good is None or good.step in (2, 4) and not skipped
    assert not list((run.checkpoints / ".partial").glob("*"))
    train.whole(run)
    assert adapter_hash(run) == adapter_hash(finished)


def test_the_supervisor_says_paused_and_resume_continues(make_run, finished, disk):
    run = on_disk(make_run(), disk)
    ballast = fill(disk, 24_000)
    control.start(run)
    assert control.wait(run, 900)
    ballast.unlink()
    state = read_state(run)
    assert state.state == "paused" and state.exit_code == 7 and "finetune resume" in state.message
    control.resume(run)
    assert control.wait(run, 900)
    assert adapter_hash(run) == adapter_hash(finished)


def test_merging_leaves_nothing_and_works_after_space_is_freed(finished, disk):
    ballast = fill(disk, 9_000_000)  # enough by the check before, taken away by another program while it writes

    def taken(text):
        if text == "writing":
            fill(disk, name="more")

    with pytest.raises(DiskFull, match="could not be written"):
        merge(finished, disk / "merged", progress=taken)
    assert sorted(path.name for path in disk.iterdir()) == ["ballast", "more"]
    ballast.unlink()
    (disk / "more").unlink()
    assert (merge(finished, disk / "merged") / "model.safetensors").stat().st_size > 1_000_000


def test_a_new_run_is_made_whole_or_not_at_all(disk):
    fill(disk, 30_000)
    recipe = ["tiny-cpu", "max_steps=2", "save_steps=0", f"output_dir={disk}/run"]
    process = subprocess.run([sys.executable, "-m", "finetune", "run", *recipe], capture_output=True, text=True)
    assert process.returncode == 7, process.stderr
    assert "Free some space" in process.stderr and "Traceback" not in process.stderr
    assert [path.name for path in disk.iterdir()] == ["ballast"]


def test_a_full_disk_tears_no_event_and_loses_no_file(disk):
    writer = EventWriter(disk / "events.jsonl")
    write_json(disk / "plan.json", {"kept": True})
    fill(disk)
    with pytest.raises(OSError, match=r"[Dd]isk is full|No space left"):
        while True:
            writer.emit(RunWarning(message="x" * 1000))
    with pytest.raises(OSError, match="No space left"):
        write_json(disk / "plan.json", {"kept": "x" * 100_000})
    (disk / "ballast").unlink()
    writer.emit(State(state="running"))
    EventWriter(disk / "events.jsonl").emit(State(state="finished"))
    events = read_events(disk / "events.jsonl")
    assert [event.state for event in events if isinstance(event, State)][-1] == "finished"
    assert (disk / "plan.json").read_text() == '{\n "kept": true\n}'


def test_what_comes_after_training_says_that_the_disk_is_full(finished, disk, finetune, monkeypatch):
    run = on_disk(finished, disk)
    before = {path for path in run.path.rglob("*") if path.is_file()}
    ballast = fill(disk)
    for verb, arguments in {"merge": "has 0 B free", "report": "No space left"}.items():
        code, output = finetune(verb, str(run.path))
        assert code == 7 and arguments in output, output
    code, output = finetune("eval", str(run.path), "--rows", "2", "--score", "loss")
    assert code == 0 and "answers are not kept" in output, output
    assert finetune("push", str(run.path), "alice/lora", "--dry-run")[0] == 0
    monkeypatch.chdir(disk)
    foreign = str(Path(__file__).parents[1] / "recipe" / "foreign" / "llama-factory.yaml")
    two = ("compare", str(run.path), str(finished.path))
    for arguments in (two, ("recipes", "copy", "tiny-cpu"), ("convert", foreign, "-o", "r")):
        code, output = finetune(*arguments)
        assert code == 7 and "No space left" in output, output
    assert {path for path in run.path.rglob("*") if path.is_file() and path.stat().st_size} <= before
    assert sorted(path.name for path in disk.iterdir()) == ["ballast", "run"]
    ballast.unlink()
    assert finetune("merge", str(run.path))[0] == 0 and finetune("report", str(run.path))[0] == 0


@pytest.mark.parametrize("text", [
    "[enforce fail at inline_container.cc:659] . unexpected pos 1472 vs 1366",
    "PytorchStreamWriter failed writing file data/3: file write failed",
    "I/O error: No space left on device (os error 28)",
])  # fmt: skip
def test_a_librarys_own_error_of_a_write_is_one_of_the_disk(text):
    assert is_disk_full(RuntimeError(text)) and not is_disk_full(RuntimeError("shape mismatch"))
