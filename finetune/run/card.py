"""The run's GPU: select, queue for, open, and limit to the plan's memory budget."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from finetune.card import cuda, nvidia
from finetune.card.card import expandable_segments, has_windows_driver
from finetune.card.nvidia import Device, DriverError
from finetune.card.visible import problem_of_torch, usable_devices
from finetune.compat.triton import triton_problem
from finetune.errors import CardError
from finetune.files import cache_dir, read_object, write_json
from finetune.memory.forecast import EXPANDABLE, SEGMENTED
from finetune.planner.plan import Plan, read_plan
from finetune.run.directory import RunDirectory
from finetune.run.state import is_recorded_process, process_record
from finetune.system import take_lock
from finetune.units import format_bytes


def cards_of(plan: Plan) -> tuple[str, ...]:
    """Return the UUIDs of the run's GPUs on this machine; empty on a CPU."""
    planned = plan.card
    if planned.is_cpu or planned.uuid is None:
        return ()
    devices = list(usable_devices())
    processes = plan.settings.launch.processes_here
    if processes == 1:  # the planned GPU, else a GPU of the same name, else the first
        devices.sort(key=lambda device: (device.uuid != planned.uuid, device.name != planned.name))
    return tuple(device.uuid for device in devices[:processes])  # of several processes: the first GPUs


def replacement_message(plan: Plan, cards: tuple[str, ...]) -> str:
    """Return a message for a run on a smaller GPU or another kind of GPU than planned."""
    if not cards or plan.card.uuid in cards:
        return ""
    smallest = min(_devices(cards), key=lambda device: device.total_bytes, default=None)
    if smallest is None or (smallest.name == plan.card.name and smallest.total_bytes >= plan.card.total_bytes):
        return ""
    size, planned_size = format_bytes(smallest.total_bytes), format_bytes(plan.card.total_bytes)
    message = f"the planned GPU, {plan.card.name} with {planned_size}, is missing; the run uses {smallest.name} with {size}"
    peak_bytes = plan.forecast.peak_high_bytes if plan.forecast else 0
    return f"{message}, and may need {format_bytes(peak_bytes)}" if peak_bytes > smallest.total_bytes else message


def lost_card(plan: Plan, run: Path) -> CardError | None:
    """Return the error if a GPU of the run has stopped answering the driver."""
    visible_entries = os.environ.get(nvidia.VISIBLE_VARIABLE, "").split(",")
    visible_uuids = [entry for entry in visible_entries if entry.startswith(nvidia.UUID_PREFIX)]
    run_uuids = visible_uuids or ([plan.card.uuid] if plan.card.uuid else [])
    try:
        devices, lost_devices = nvidia.read_devices()
    except DriverError:
        return None
    if plan.card.is_cpu or not lost_devices or {device.uuid for device in devices} >= set(run_uuids):
        return None
    reasons = ", ".join(sorted({device.why for device in lost_devices}))
    fix = f"{lost_devices[0].fix} Then: finetune resume {run}"
    return CardError(f"{plan.card.name} no longer responds ({reasons})", fix)


def visibility(cards: Sequence[str]) -> dict[str, str]:
    """Return environment variables that show only these GPUs, to be set before the first driver call."""
    return {nvidia.VISIBLE_VARIABLE: ",".join(cards), **dict([nvidia.DRIVER_ORDER])} if cards else {}


def restrict_visible_devices(run: RunDirectory) -> None:
    """Show this process only the run's GPU; call before other imports."""
    # bitsandbytes opens CUDA at import
    os.environ.update(visibility(cards_of(read_plan(run.plan))[:1]))


def holders_of(cards: tuple[str, ...]) -> list[str]:
    """Return the processes on these GPUs with their bytes."""
    return [holder for device in _devices(cards) for holder in device.holders]


def _devices(cards: Collection[str]) -> list[Device]:
    try:
        return [device for device in nvidia.read_devices()[0] if device.uuid in cards]
    except DriverError:
        return []


class Queue:
    """Queue of runs that share GPUs, by UUID or name: ticket files, each valid while its process lives."""

    def __init__(self, cards: Sequence[str]) -> None:
        # the folder holds the tickets of all runs of this user
        self.folder, self.cards = cache_dir() / "queue", list(cards)

    def join(self, run: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # else a ticket could appear ahead of a started run; another run's `join` takes milliseconds
        lock = take_lock(self.folder / "lock", wait_s=10.0)
        try:
            prefixes = (ticket.name.partition("-")[0] for ticket in self.folder.glob("*.json"))
            last_number = max((int(prefix) for prefix in prefixes if prefix.isdecimal()), default=0)
            # not the time alone: the clock may have been set back
            self._ticket = self.folder / f"{max(time.time_ns(), last_number + 1):020d}-{os.getpid()}.json"
            write_json(self._ticket, {**process_record(os.getpid()), "run": str(run.resolve()), "cards": self.cards})
        finally:
            if lock is not None:
                lock.release()

    def ahead(self) -> list[str]:
        """Return the runs that this run waits for; remove tickets of dead processes."""
        ahead = []
        for ticket in sorted(self.folder.glob("*.json")):
            if (record := read_object(ticket)) is None:  # removed meanwhile, or incomplete
                continue
            if not is_recorded_process(record):
                ticket.unlink(missing_ok=True)
            elif ticket.name < self._ticket.name and not set(self.cards).isdisjoint(record.get("cards", ())):
                ahead.append(record["run"])
        return ahead

    def leave(self) -> None:
        self._ticket.unlink(missing_ok=True)


def plain_segments_message(plan: Plan) -> str:
    """Return a message when torch ignores `expandable_segments`."""
    # the environment can switch it off; known only after the model was loaded
    if not expandable_segments() or not cuda.has_plain_segments():
        return ""
    peak_bytes = plan.forecast.peak_high_bytes if plan.forecast else 0
    peak_without_bytes = round(peak_bytes * (1 + SEGMENTED[-1]) / (1 + EXPANDABLE[-1]))
    return (
        "torch's allocator ignores expandable_segments, which the forecast assumes: the run may need "
        f"{format_bytes(peak_without_bytes)} instead of {format_bytes(peak_bytes)}. Check PYTORCH_ALLOC_CONF in the environment"
    )


def available_bytes(plan: Plan) -> int | None:
    """Return the bytes that the run may use now, CUDA context included; None without a GPU."""
    free_bytes = [device.free_bytes for device in _devices(cards_of(plan))]
    return min(plan.usable_bytes, *free_bytes) if free_bytes else None


def open_card(plan: Plan, local_rank: int) -> None:
    """Create the CUDA context and run a kernel. Raises CardError."""
    card, driver = plan.card, None
    try:
        cuda.open_card(local_rank)
    except (RuntimeError, AssertionError) as error:
        with contextlib.suppress(DriverError):
            driver = nvidia.driver_versions()
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem, fix = f"{card.name} can't be used: {text}", "Check this machine: finetune doctor"
        if "out of memory" in text:
            users = ", ".join(holders_of((card.uuid or "",))[:6])
            problem = f"{card.name} has no memory left for a CUDA context"
            fix = f"Close programs that use this GPU{f': {users}' if users else ''}."
        # a build of torch that can't use this GPU or driver is the likelier cause
        raise CardError(*(problem_of_torch(card.name, card.capability, driver) or (problem, fix))) from error


def limit_card(plan: Plan) -> str:
    """Limit the allocator to the budget; return a warning when too little is free."""
    context_bytes, free_bytes = plan.card.context_bytes or 0, cuda.free_bytes()
    limit_bytes = max(0, plan.usable_bytes - context_bytes)
    # the Windows driver would spill to host memory
    cuda.limit_reserved(min(limit_bytes, free_bytes) if has_windows_driver() else limit_bytes)
    upper_end_bytes = plan.forecast.peak_high_bytes - context_bytes if plan.forecast else limit_bytes
    needed_bytes = min(limit_bytes, upper_end_bytes) - plan.card.context_uncertainty_bytes
    if free_bytes >= needed_bytes:
        return ""
    free = f"{plan.card.name} has {format_bytes(free_bytes)} free besides the run's CUDA context"
    return f"{free}; the run may need {format_bytes(needed_bytes)}, the upper end of its forecast"


def kernel_problem() -> str:
    """Return why Triton's kernels can't run, or an empty text."""
    # TRL's loss and compiled layers use Triton; bitsandbytes ships compiled kernels
    problem = triton_problem()
    if not problem:
        try:
            cuda.try_kernel()
        except Exception as error:  # noqa: BLE001 - Triton, the linker and the driver raise different errors
            first_line = (str(error).strip().splitlines() or [""])[0][:300]
            problem = f"Triton can't compile: {type(error).__name__}: {first_line}"
    return problem
