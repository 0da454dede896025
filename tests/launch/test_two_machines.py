"""Two machines, each with its own address, supervisor and run directory, train, stop and fail together."""

import os
import signal
import subprocess
import time

import pytest
from launch_runs import OUT_OF_MEMORY_ON_RANK_1, adapter, events_of, last_state, steps
from warm import CLIENT, start_server

from finetune.events import Retry, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines():
    """Address of machine 0, and the prefix and network interface of each machine: namespaces if possible, else loopback."""
    if os.geteuid() or subprocess.run(["ip", "netns", "list"], capture_output=True).returncode:
        yield "127.0.0.2", [(), ()], ("lo", "lo")
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
        yield "10.213.7.1", [("ip", "netns", "exec", name) for name in names], ("fta", "ftb")
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def sockets(machines, tmp_path_factory):
    """On each machine a server of Python processes with the libraries imported, for the launchers."""
    sockets = [tmp_path_factory.mktemp("warm") / "socket" for _ in machines[1]]
    for socket, prefix in zip(sockets, machines[1], strict=True):
        start_server(socket, os.getpid(), prefix)
    return [str(socket) for socket in sockets]


@pytest.fixture(scope="module")
def start(machines, sockets, make_launch, supervise):
    """start(*overrides) -> the supervised runs of machine 0 and machine 1; `start.resume(runs)` resumes both."""
    address, prefixes, interfaces = machines
    warm = [
        {"PYTHON_EXEC": CLIENT, "WARM_PYTHON": socket, "GLOO_SOCKET_IFNAME": interface}
        for socket, interface in zip(sockets, interfaces, strict=True)
    ]

    def start_runs(*overrides, **environment):
        shared = ["launch.num_processes=2", "launch.num_machines=2", f"launch.main_process_ip={address}", *overrides]
        runs = [make_launch(*shared, f"launch.machine_rank={machine}") for machine in (0, 1)]
        return resume_runs(runs, **environment)

    def resume_runs(runs, **environment):
        supervisors = zip(runs, prefixes, warm, strict=True)
        return [supervise(run, prefix, **python, **environment) for run, prefix, python in supervisors]

    start_runs.resume = resume_runs
    return start_runs


def test_two_machines_train_together_and_each_has_all_events_and_files(start, run_of_one):
    first, second = start()
    assert (first.wait(), second.wait()) == (0, 0), first.run.log.read_text()[-2000:] + second.run.log.read_text()[-2000:]
    for second_step, first_step, expected in zip(steps(second.run), steps(first.run), steps(run_of_one), strict=True):
        assert second_step.loss == first_step.loss == pytest.approx(expected.loss, rel=1e-4)
    for name, weights in adapter(first.run).items():
        assert weights.equal(adapter(second.run)[name])
    for run in (first.run, second.run):
        assert sorted(path.name for path in run.checkpoints.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
        assert (run.checkpoints / "checkpoint-2" / f"rng_state_{0 if run is first.run else 1}.pth").is_file()


def test_out_of_memory_on_one_machine_ends_both_without_a_retry_of_one(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY_ON_RANK_1)
    first, second = start(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert (first.wait(), second.wait()) == (1, 5)
    assert "see log.txt on each machine" in last_state(first.run).message
    assert "per_device_train_batch_size=1" in last_state(second.run).message
    assert not events_of(first.run, Retry) + events_of(second.run, Retry)


def test_a_machine_that_dies_ends_the_other_in_time_and_both_resume_from_the_same_checkpoint(start):
    first, second = start("max_steps=400", "save_steps=1")
    first.wait_for_step(3)
    second.wait_for_step(3)
    for pid in [*second.ranks().values(), second.process.pid]:
        os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    assert first.wait() == 1
    assert time.monotonic() - killed_s < 300  # gloo would wait for half an hour
    assert last_state(first.run).state == "failed" and "finetune resume" in last_state(first.run).message
    second.process.wait()
    first_resumed, second_resumed = start.resume([first.run, second.run])
    first_resumed.wait_for_step(steps(first.run)[-1].step + 2)
    start_steps = [events_of(run, Start)[-1].step for run in (first_resumed.run, second_resumed.run)]
    assert start_steps[0] == start_steps[1] >= 2
    first_resumed.process.send_signal(signal.SIGTERM)  # one machine is asked; both stop after the same step
    assert (first_resumed.wait(), second_resumed.wait()) == (143, 143)
    assert steps(first_resumed.run)[-1].step == steps(second_resumed.run)[-1].step
