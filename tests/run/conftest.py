"""Real runs of the bundled model. A forked child trains (imports are paid once); faults are put in by patching the child."""

import os
import pickle
import shutil
import signal
import sys

import pytest
from killed import start_worker

from finetune.events import read_events
from finetune.files import MANIFEST, read_json, sha256_of


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    """make_run(*overrides) -> a run directory that has not been started, of a few quick steps."""
    import torch

    from finetune.bundled import dataset_paths
    from finetune.recipe import load_recipe
    from finetune.run.directory import RunDirectory
    from finetune.run.prepare import create_run, prepare

    folder, few = tmp_path_factory.mktemp("held_out"), {}
    for name in ("support", "support-pairs"):  # the loss of all 120 rows takes longer than the steps
        rows = dataset_paths(name)["eval"].read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(rows[:8]), encoding="utf-8")
        few[name] = f"dataset.eval_path={folder / name}.jsonl"
    short = [
        "max_steps=8", "save_steps=2", "effective_batch_size=2", "per_device_train_batch_size=1", "dataset.max_rows=16",
        "save_total_limit=3", "lora_r=4", "lora_alpha=8", "eval_steps=0", "target_modules=[q_proj, down_proj]",
    ]  # fmt: skip

    def make(*overrides):
        path = tmp_path_factory.mktemp("runs") / "run"
        data = next((value for value in reversed(overrides) if value.startswith("dataset.path=")), "dataset.path=support")
        held_out = [few[name] for name in few if data == f"dataset.path={name}"]
        recipe = load_recipe("tiny-cpu", [*short, *held_out, *overrides, f"output_dir={path}"])
        if torch.version.cuda is None:
            return create_run(prepare(recipe))
        # with a torch for CUDA, a process that has run a step on fake tensors forks no child that can train
        error_file = path.with_name("error")
        if not (pid := os.fork()):
            try:
                create_run(prepare(recipe))
            except Exception as error:  # noqa: BLE001 - raised again by the parent
                error_file.write_bytes(pickle.dumps(error))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        if error_file.exists():
            raise pickle.loads(error_file.read_bytes())
        return RunDirectory(path)

    return make


@pytest.fixture(scope="session")
def train():
    """train(run, fault=None) -> exit status of a forked worker; `fault()` patches the child before it starts.

    train.whole(run) -> the run, trained to its end.
    """
    import finetune.model.techniques
    import finetune.run.callbacks
    import finetune.run.training  # noqa: F401 - so that a child does not have to

    def wait(pid):
        status = os.waitpid(pid, 0)[1]
        return os.waitstatus_to_exitcode(status)

    def run_to_end(run, fault=None):
        return wait(start_worker(run, fault))

    def whole(run):
        assert run_to_end(run) == 0, run.log.read_text()[-2000:]
        return run

    run_to_end.start, run_to_end.wait, run_to_end.whole = start_worker, wait, whole
    return run_to_end


@pytest.fixture
def warm_starts(warm_python, monkeypatch):
    """Runs that are started as a command starts them: their processes are without seconds of imports."""
    monkeypatch.setattr(sys, "executable", warm_python)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def events_of(run, kind):
    """The run's events of a kind: a class, or its name."""
    name = kind if isinstance(kind, str) else kind.kind
    return [event for event in read_events(run.events) if event.kind == name]


def started_to(train, run, step, mark) -> int:
    """The process of a run that has ended `step` and waits for the file `mark`."""
    from child_faults import waiting_after  # here: tests/sweep loads this file without this folder

    pid = train.start(run, waiting_after(step, mark))
    while step not in [event.step for event in events_of(run, "step")]:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), run.log.read_text()[-2000:]
    return pid


def copy_of(run, path, *without):
    """A copy of a run without these files, given as patterns."""
    return type(run)(shutil.copytree(run.path, path, ignore=shutil.ignore_patterns("*lock", *without)))


def fresh_copy(run, path):
    """A copy of a run as it was before its start."""
    return copy_of(run, path, "events.jsonl", "log.txt", "adapter*", "checkpoint-*")


def flip_one_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def manifest(folder):
    return read_json(folder / MANIFEST)


def adapter_hash(run) -> str:
    return sha256_of(run.adapter / "adapter_model.safetensors")
