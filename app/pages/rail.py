"""Rail: running job and GPU memory."""

from __future__ import annotations

from finetune.card.nvidia import Device
from finetune.card.visible import usable_devices
from finetune.errors import FinetuneError
from finetune.run.state import is_alive

from ..live import LiveRun
from ..views import rail as views
from ..views.rail import GpuMemory, RunningJob
from ..web.followed import FollowedPage


class Rail(FollowedPage):
    """Running job and GPU memory."""

    name, part_names, every_ms = "rail", ("now",), 3000

    def parts(self) -> dict[str, str]:
        try:
            live = self._live()
            return {"now": views.status(_job(live) if live else None, gpu_memory(live))}
        except (FinetuneError, OSError, ValueError):  # a damaged run
            return {"now": views.status(None, gpu_memory(None))}

    def _live(self) -> LiveRun | None:
        run = next((run for run in self.context.workspace.list_runs() if is_alive(run)), None)
        if run is None:
            return None
        live = self.context.lives.of(run)
        live.refresh()
        return live


def _job(live: LiveRun) -> RunningJob:
    newest = live.digest.newest_step
    total = (newest.total_steps if newest else None) or live.plan().total_steps
    share, left_s = min(1.0, live.digest.step / total) if live.digest.step and total else None, live.digest.pace.left_s
    return RunningJob(live.run.path.name, share, left_s)


def gpu_memory(live: LiveRun | None) -> list[GpuMemory]:
    """Return the memory of the usable GPUs."""
    return [
        GpuMemory(device.name, device.total_bytes, device.free_bytes, _run_bytes(live, device)) for device in usable_devices()
    ]


def _run_bytes(live: LiveRun | None, device: Device) -> int | None:
    step = live.digest.newest_step if live and live.plan().card.uuid == device.uuid else None
    if step is None or step.card_used_bytes is None or step.other_processes_bytes is None:
        return None
    return max(0, step.card_used_bytes - step.other_processes_bytes)
