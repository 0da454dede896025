"""Two machines, each with its own address, supervisor and run directory: they train, stop, fail and retry together."""

import os
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest
from launch_runs import OUT_OF_MEMORY_ON_RANK_1, adapter, last_state, steps
from warm import CLIENT, warm_server

from finetune.events import Retry, Start, read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def may_make_namespaces():
    return os.geteuid() == 0 and subprocess.run(["ip", "netns", "list"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def machines():
    """Address of machine 0, and for each machine what stands before a command: network namespaces, else loopback."""
    if not may_make_namespaces():
        yield "127.0.0.2", [(), ()]
        return
    names = [f"finetune{os.getpid()}{letter}" for letter in "ab"]
    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", "fta", "netns", names[0], "type", "veth", "peer", "name", "ftb", "netns", names[1])
        for name, link, address in zip(names, ("fta", "ftb"), ("10.213.7.1/24", "10.213.7.2/24"), strict=True):
            ip("-n", name, "addr", "add", address, "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield "10.213.7.1", [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def sockets(machines, tmp_path_factory):
    """On each machine a server of Pythons that have the libraries imported already: for what the launchers start."""
    with ExitStack() as stack:
        yield [stack.enter_context(warm_server(tmp_path_factory.mktemp("warm"), prefix)) for prefix in machines[1]]


@pytest.fixture(scope="module")
def start(machines, sockets, make_launch, supervise):
    """start(*overrides) -> the supervised runs of machine 0 and machine 1; `start.again(runs)` resumes both."""
    address, prefixes = machines
    warm = [{"PYTHON_EXEC": CLIENT, "WARM_PYTHON": socket} for socket in sockets]

    def begin(*overrides, **environment):
        shared = ["launch.num_processes=2", "launch.num_machines=2", f"launch.main_process_ip={address}", *overrides]
        runs = [make_launch(*shared, f"launch.machine_rank={number}") for number in (0, 1)]
        return again(runs, **environment)

    def again(runs, **environment):
        places = zip(runs, prefixes, warm, strict=True)
        return [supervise(run, prefix, **python, **environment) for run, prefix, python in places]

    begin.again = again
    return begin


def test_two_machines_train_together_and_each_has_the_whole_story(start, one):
    here, there = start()
    assert (here.wait(), there.wait()) == (0, 0), here.run.log.read_text()[-2000:] + there.run.log.read_text()[-2000:]
    for far, near, alone in zip(steps(there.run), steps(here.run), steps(one), strict=True):
        assert far.loss == near.loss == pytest.approx(alone.loss, rel=1e-4)
    for name, weights in adapter(here.run).items():
        assert weights.equal(adapter(there.run)[name])
    for run in (here.run, there.run):
        assert sorted(path.name for path in run.checkpoints.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
        assert (run.checkpoints / "checkpoint-2" / f"rng_state_{0 if run is here.run else 1}.pth").is_file()


def test_a_machine_that_dies_ends_the_other_in_time_and_both_resume_from_the_seal_that_both_have(start):
    here, there = start("max_steps=400", "save_steps=1")
    here.wait_for_step(3)
    there.wait_for_step(3)
    for pid in [*there.ranks().values(), there.process.pid]:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    assert here.wait() == 1
    assert time.monotonic() - began < 300  # gloo would wait for half an hour
    assert last_state(here.run).state == "failed" and "finetune resume" in last_state(here.run).message
    there.process.wait()
    near, far = start.again([here.run, there.run])
    near.wait_for_step(steps(here.run)[-1].step + 2)
    began_from = [
        [event for event in read_events(run.events) if isinstance(event, Start)][-1].step for run in (near.run, far.run)
    ]
    assert began_from[0] == began_from[1] >= 2
    near.process.send_signal(signal.SIGTERM)  # one machine is asked; both stop after the same step
    assert (near.wait(), far.wait()) == (143, 143)
    assert steps(near.run)[-1].step == steps(far.run)[-1].step


def test_out_of_memory_on_one_machine_is_the_same_retry_on_both(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY_ON_RANK_1)
    here, there = start(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert (here.wait(), there.wait()) == (0, 0), here.run.log.read_text()[-2000:] + there.run.log.read_text()[-2000:]
    for run in (here.run, there.run):
        retries = [event for event in read_events(run.events) if isinstance(event, Retry)]
        assert [retry.changes for retry in retries] == [{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}]
