"""Many processes as one worker, as the supervisor sees them: the command that starts them, their signals, their one ending."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from finetune.distributed.configuration import is_distributed, write_configuration
from finetune.distributed.ranks import TOGETHER, ending_path
from finetune.events import State, event_from

if TYPE_CHECKING:
    from finetune.events import Event
    from finetune.plan.plan import Plan


#: Seconds that the launcher gives the other processes when one has ended badly, before it kills them.
SHUTDOWN_S = 15
_WORKER = "finetune.run.worker"


class ManyProcesses:
    """What differs from a plain worker when `launch` asks for several processes, or for FSDP or DeepSpeed."""

    def __init__(self, run: Path, log: Path, plan: Plan) -> None:
        self.run, self.log, self.plan = run, log, plan
        self.locals = plan.settings.launch.num_processes // plan.settings.launch.num_machines

    def command(self) -> list[str]:
        """`accelerate launch` of the worker with the run's own configuration; on processors, which it leaves out, torchrun."""
        worker = ["-m", _WORKER, str(self.run)]
        if not self.plan.card.is_cpu:
            configuration = write_configuration(self.run, self.plan)
            return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration), *worker]
        launch = self.plan.settings.launch
        port = launch.main_process_port if launch.num_machines > 1 else _free_port()
        where = ["--master-addr", launch.main_process_ip, "--master-port", str(port)]
        which = ["--nnodes", str(launch.num_machines), "--node-rank", str(launch.machine_rank)]
        return [sys.executable, "-m", "torch.distributed.run", *which, *where, "--nproc-per-node", str(self.locals), *worker]

    def environment(self) -> dict[str, str]:
        """Set for the launcher and so for every process: how long a failure may take, and which network to use."""
        values = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}
        if "OMP_NUM_THREADS" not in os.environ:
            values["OMP_NUM_THREADS"] = str(max(1, (psutil.cpu_count(logical=False) or 1) // self.locals))
        launch = self.plan.settings.launch
        if launch.num_machines > 1 and (interface := interface_towards(launch.main_process_ip)):
            values |= {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
        return values

    def prepare(self) -> None:
        """Forget how an earlier attempt ended."""
        ending_path(self.run, 0).parent.mkdir(exist_ok=True)
        for local in range(self.locals):
            ending_path(self.run, local).unlink(missing_ok=True)

    def send(self, launcher: subprocess.Popen[bytes], number: int) -> None:
        """A signal for the processes that train; the launcher itself would end them in the middle of a step."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(launcher.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if _WORKER in child.cmdline():
                        child.send_signal(number)

    def settle(self, code: int, emit: Callable[[Event], None]) -> int:
        """The exit status of all, from what each said last; `emit`s what the leader held back. `code`: the launcher's."""
        endings = {local: ending for local in range(self.locals) if (ending := self._ending(local)) is not None}
        if 0 in endings and endings[0]["exit_code"] in TOGETHER:  # the leader has written it itself
            return int(endings[0]["exit_code"])
        if not endings:  # nobody got as far as saying anything
            return code
        cause = min(endings.values(), key=lambda ending: _ORDER.index(ending["exit_code"]))
        silent = [str(local) for local in range(self.locals) if local not in endings]
        if silent and cause["exit_code"] == 1:  # what the others say of lost connections follows from that
            emit(State(state="failed", exit_code=1, message=self._killed(silent)))
        elif cause["exit_code"] == 1 and self.plan.settings.launch.num_machines > 1:
            emit(State(state="failed", exit_code=1, message=self._lost(str(cause["event"].get("message", "")))))
        else:
            emit(event_from(cause["event"]))
        return int(cause["exit_code"])

    def _killed(self, silent: list[str]) -> str:
        which = f"process {', '.join(silent)} of {self.locals}"
        resume = f"go on from the last checkpoint with: finetune resume {self.run}"
        return f"{which} was killed (often: host memory ran out), see {self.log}; {resume}"

    def _lost(self, said: str) -> str:
        """Any process may have been the first to end, here or elsewhere; the others only say that they can't reach it."""
        resume = f"go on, on every machine, with: finetune resume {self.run}"
        return f"a process ended, or its machine could not be reached ({said[:200]}), see the machines' log.txt; {resume}"

    def _ending(self, local: int) -> dict[str, Any] | None:
        try:
            return json.loads(ending_path(self.run, local).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None


#: Of several endings the first here is the cause: out of memory, disk, divergence, a bad recipe, anything else.
_ORDER = (5, 7, 6, 4, 3, 2, 1, 143, 130, 0)


def many_processes(run: Path, log: Path, plan: Plan) -> ManyProcesses | None:
    """How to start the plan's processes; None when a plain worker does."""
    return ManyProcesses(run, log, plan) if is_distributed(plan.settings) else None


def interface_towards(address: str) -> str | None:
    """Name of the network interface whose address this machine uses towards `address`; None when it can't be told."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it only chooses the route
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
