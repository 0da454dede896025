"""Memory of every visible card through NVML, sampled while something else runs; opens no CUDA context."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import pynvml

_INTERVAL_S = 0.05


def handles() -> list[Any]:
    """NVML's handles of the visible cards; empty where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def first_call(handle: Any) -> Any:
    """NVML's first memory call: `used` includes the driver's reserve."""
    return pynvml.nvmlDeviceGetMemoryInfo(handle)


def second_call(handle: Any) -> Any:
    """NVML's second memory call: the reserve is a field of its own."""
    return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)


@functools.cache
def _card_of_this_process() -> Any:
    """NVML's handle of the card that torch computes on; None without one."""
    import torch

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def used_here() -> dict[str, int]:
    """Bytes in use on the card that torch computes on; empty where the driver does not say."""
    handle = _card_of_this_process()
    return {} if handle is None else {"card_used_bytes": second_call(handle).used}


class CardWatch:
    """Inside `with`, samples the used bytes of each card; `growth` are the peaks less `before`, the bytes at the start."""

    def __init__(self) -> None:
        self._handles = handles()
        self._ended = threading.Event()
        self.before: list[int] = []
        self._peaks: list[int] = []

    def __enter__(self) -> CardWatch:
        self._ended.clear()
        self.before = self._used()
        self._peaks = list(self.before)
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def growth(self) -> list[int]:
        """Bytes by card; empty without a card."""
        return [peak - before for peak, before in zip(self._peaks, self.before, strict=True)]

    def _used(self) -> list[int]:
        return [second_call(handle).used for handle in self._handles]

    def _sample(self) -> None:
        while self._handles and not self._ended.wait(_INTERVAL_S):
            self._peaks = [max(pair) for pair in zip(self._peaks, self._used(), strict=True)]
