"""Measures memory of the training process: torch's allocator, the whole card through NVML, and host memory (RSS)."""

from __future__ import annotations

import os
from typing import Any

import psutil

from finetune.events import Memory
from finetune.system import peak_rss_bytes


class MemorySampler:
    """Samples memory in well under a millisecond: RSS, and on CUDA the allocator and the whole card."""

    def __init__(self, on_cuda: bool) -> None:
        self._process = psutil.Process()
        self._on_cuda = on_cuda
        self._card = _NvmlCard() if on_cuda else None

    def sample(self) -> Memory:
        """Bytes now and at the peak since `reset_peak`."""
        return Memory(
            process_rss_bytes=self._process.memory_info().rss, process_peak_rss_bytes=peak_rss_bytes(),
            **(self._allocator() if self._on_cuda else {}), **(self._card.sample() if self._card is not None else {}),
        )  # fmt: skip

    def sensors(self) -> dict[str, Any]:
        """Temperature and power of the card; null on a CPU."""
        return self._card.sensors() if self._card is not None else {"temperature_c": None, "power_w": None}

    def reset_peak(self) -> None:
        """Reset the peak; each step and phase has its own."""
        if self._on_cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def _allocator(self) -> dict[str, int | None]:
        import torch

        stats = torch.cuda.memory_stats()
        return {
            "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
            "peak_allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
            "reserved_bytes": stats.get("reserved_bytes.all.current", 0),
            "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
            "inactive_split_bytes": stats.get("inactive_split_bytes.all.current", 0),
        }


class _NvmlCard:
    """The whole card through NVML; values that the driver does not report are null."""

    def __init__(self) -> None:
        import pynvml
        import torch

        self._nvml: Any = pynvml
        self._handle: Any = None
        try:
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except pynvml.NVMLError:
            self._handle = None

    def sample(self) -> dict[str, int | None]:
        if self._handle is None:
            return {}
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError:
            return {}
        return {"card_used_bytes": memory.used, "card_total_bytes": memory.total, "other_processes_bytes": self._others()}

    def _others(self) -> int | None:
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        used = [process.usedGpuMemory for process in processes if process.pid != os.getpid()]
        return None if any(bytes_ is None for bytes_ in used) else sum(used)

    def sensors(self) -> dict[str, float | None]:
        values: dict[str, float | None] = {"temperature_c": None, "power_w": None}
        if self._handle is None:
            return values
        try:
            values["temperature_c"] = self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU)
            values["power_w"] = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
        except self._nvml.NVMLError:
            return values
        return values
