"""Launcher of several ranks for the supervisor."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from finetune import errors
from finetune.distributed.configuration import write_configuration
from finetune.distributed.ranks import COMMON_EXITS, ending_path
from finetune.errors import FAILED
from finetune.events import Event, State, event_from
from finetune.files import read_object
from finetune.planner.plan import Plan

SHUTDOWN_S = 15  # seconds between the failure of a rank and the kill of all ranks
_WORKER = "finetune.run.worker"


class Launcher:
    """Runs the worker through `accelerate launch` or torchrun."""

    def __init__(self, run: Path, log: Path, plan: Plan) -> None:
        self.run, self.log, self.plan = run, log, plan
        self.local_world_size = plan.settings.launch.processes_here

    def command(self) -> list[str]:
        """Return the command line of the launcher; write its configuration."""
        # final events of an earlier attempt would count for this attempt
        ending_path(self.run, 0).parent.mkdir(exist_ok=True)
        for local in range(self.local_world_size):
            ending_path(self.run, local).unlink(missing_ok=True)
        worker = ["-m", _WORKER, str(self.run)]
        if not self.plan.card.is_cpu:
            configuration = write_configuration(self.run, self.plan)
            return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration), *worker]
        launch = self.plan.settings.launch
        port = launch.main_process_port if launch.num_machines > 1 else _free_port()
        rendezvous = ["--master-addr", launch.main_process_ip, "--master-port", str(port)]
        node = ["--nnodes", str(launch.num_machines), "--node-rank", str(launch.machine_rank)]
        size = ["--nproc-per-node", str(self.local_world_size)]
        # accelerate can't launch ranks on the CPU
        return [sys.executable, "-m", "torch.distributed.run", *node, *rendezvous, *size, *worker]

    def environment(self) -> dict[str, str]:
        values = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}
        if "OMP_NUM_THREADS" not in os.environ:
            values["OMP_NUM_THREADS"] = str(max(1, (psutil.cpu_count(logical=False) or 1) // self.local_world_size))
        launch = self.plan.settings.launch
        if launch.num_machines > 1 and (interface := interface_towards(launch.main_process_ip)):
            values |= {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
        return values

    def send(self, launcher: subprocess.Popen[bytes], number: int) -> None:
        # not to the launcher: it would end the ranks in the middle of a step
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(launcher.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if _WORKER in child.cmdline():
                        child.send_signal(number)

    def exit_status(self, code: int, emit: Callable[[Event], None]) -> int:
        """Return one exit status for all local ranks; emit the event of the failure."""
        ranks = range(self.local_world_size)
        endings = {local: ending for local in ranks if (ending := read_object(ending_path(self.run, local)))}
        if 0 in endings and endings[0]["exit_code"] in COMMON_EXITS:  # local rank 0 has written the event
            return int(endings[0]["exit_code"])
        # `code` is the launcher's own exit status
        if not endings:  # no rank wrote a final event
            return code
        cause = min(endings.values(), key=lambda ending: _ORDER.index(ending["exit_code"]))
        silent = [str(local) for local in ranks if local not in endings]
        message, resume = "", f"with: finetune resume {self.run}"
        if silent and cause["exit_code"] == FAILED:  # lost connections of the remaining ranks follow from the kill
            reason = f"process {', '.join(silent)} of {self.local_world_size} was killed (often: out of host memory)"
            message = f"{reason}, see {self.log}; resume from the last checkpoint {resume}"
        elif cause["exit_code"] == FAILED and self.plan.settings.launch.num_machines > 1:
            # any process on any machine may have failed first: the remaining processes only report a lost connection
            reason = f"a process ended, or its machine could not be reached ({cause['event'].get('message', '')[:200]})"
            message = f"{reason}, see log.txt on each machine; resume on every machine {resume}"
        emit(State(state="failed", exit_code=FAILED, message=message) if message else event_from(cause["event"]))
        return int(cause["exit_code"])


#: The first of these exit statuses is the cause when ranks end differently.
_CAUSES = sorted(errors.exit_code_causes(), key=lambda code: (code != errors.OutOfMemory.exit_code, -code))
_ORDER = (*_CAUSES, FAILED, *reversed(errors.STOPPED), errors.FINISHED)


def interface_towards(address: str) -> str | None:
    """Return the network interface on the route to `address`; None if unknown."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing, only selects the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
