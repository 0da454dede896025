"""Real runs of several processes on the CPU, each under its supervisor, as `finetune run` starts them."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from finetune.events import Step, read_events
from finetune.run.directory import RunDirectory

SHORT = (
    "max_steps=4", "save_steps=2", "save_total_limit=9", "effective_batch_size=8", "dataset.max_rows=32", "lora_dropout=0",
    "lora_r=4", "lora_alpha=8", "eval_steps=0", "per_device_train_batch_size=2",
)  # fmt: skip


@dataclass
class Supervised:
    """A run and its supervisor's process."""

    run: RunDirectory
    process: subprocess.Popen

    def wait(self) -> int:
        return self.process.wait()

    def wait_for_step(self, step) -> None:
        while not any(isinstance(event, Step) and event.step >= step for event in read_events(self.run.events)):
            assert self.process.poll() is None, self.run.log.read_text()[-3000:]
            time.sleep(0.05)

    def ranks(self) -> dict[int, int]:
        """Process id of each rank."""
        import psutil

        pids = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "finetune.run.worker" in child.cmdline() and "RANK" in (environment := child.environ()):
                pids[int(environment["RANK"])] = child.pid
        return pids


@pytest.fixture(scope="session")
def make_launch(tmp_path_factory):
    """make_launch(*overrides) -> a run directory that has not been started."""
    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare

    def make(*overrides):
        run_directory = tmp_path_factory.mktemp("launches") / "run"
        return create_run(prepare(load_recipe("tiny-cpu", [*SHORT, *overrides, f"output_dir={run_directory}"])))

    return make


@pytest.fixture(scope="session")
def supervise(warm_python):
    """supervise(run, **environment) -> its started supervisor, killed at the end of the session if it is still running.

    The launcher is started as by users; its processes have the libraries imported already.
    """
    started = []

    def start(run, prefix=(), **environment):
        command = [*prefix, sys.executable, "-m", "finetune.run.supervise", str(run.path)]
        with run.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHON_EXEC": warm_python, **environment},
            )  # fmt: skip
        started.append(process)
        return Supervised(run, process)

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


@pytest.fixture(scope="session")
def run_of_one(make_launch, supervise):
    """A finished run of one process."""
    run = make_launch()
    assert supervise(run).wait() == 0, run.log.read_text()[-3000:]
    return run


@pytest.fixture(scope="session")
def run_of_two(make_launch, supervise):
    """The same recipe, finished by two processes."""
    run = make_launch("launch.num_processes=2")
    assert supervise(run).wait() == 0, run.log.read_text()[-3000:]
    return run
