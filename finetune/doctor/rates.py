"""`finetune doctor --measure`: speed of this machine's GPUs or CPU, for forecasts."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from finetune.card import Card, find_card, nvidia
from finetune.card.find import listed_card
from finetune.card.measured import Rates, conditions_of, store_rates
from finetune.card.nvidia import Device
from finetune.card.visible import usable_devices
from finetune.doctor import Finding
from finetune.units import MIB, Progress, format_bytes

#: Seconds of each measurement; operators per measurement of the host, fewer than the 1,024 launches that a GPU queues.
MEASURED_S, OPERATORS = 1.5, 500
#: Largest ratio of a measured to a catalogue rate, as clocks differ; largest utilisation by other programs, such as a desktop.
MOST_OF_LISTED, MOST_BUSY = 1.1, 0.2
_FIX = "Nothing is stored. A measurement needs an idle GPU with 1.5 GiB free; finetune doctor checks everything else."


def measure_rates(progress: Progress) -> list[Finding]:
    """Measure every usable GPU, else the CPU, and store plausible rates."""
    os.environ.update([nvidia.DRIVER_ORDER])
    findings = []
    for number, device in enumerate(usable_devices() or [None]):
        card = find_card(device.uuid if device else "cpu")
        progress(f"measuring {card.name}")
        if card.problem:
            findings.append(Finding("rates", "fail", f"{card.name}: {card.problem}", card.problem_fix))
            continue
        try:
            busy = 0.0
            with contextlib.suppress(nvidia.DriverError):  # WSL may not report it
                busy = nvidia.open_device(device.uuid).utilisation() if device else 0.0
            if busy > MOST_BUSY:
                raise RuntimeError(f"other programs keep it busy {busy:.0%} of the time")
            findings.append(_measure(card, device, torch.device("cuda", number) if device else torch.device("cpu")))
        except (RuntimeError, OSError) as error:  # out of memory, a cache that can't be written
            message = str(error).partition("\n")[0]
            findings.append(Finding("rates", "fail", f"{card.name} could not be measured: {message}", _FIX))
    return findings


def _measure(card: Card, device: Device | None, torch_device: torch.device) -> Finding:
    size, dtype = (8192, torch.bfloat16 if card.supports_bf16 else torch.float16) if device else (2048, torch.float32)
    matrix = torch.ones(size, size, device=torch_device, dtype=dtype)
    device_buffer, scalar = _buffer(torch_device), torch.zeros(1, device=torch_device)
    product = torch.mm(matrix, matrix)
    if not bool((product == size).all().cpu()):
        raise RuntimeError("the product of two matrices is wrong")
    matrix.normal_()  # a product of equal numbers takes less power, so a GPU clocks higher
    product_s = _median_s(torch_device, lambda: torch.mm(matrix, matrix, out=product))
    rates = Rates(
        flops=2 * size**3 / product_s,
        bandwidth_bytes_s=2 * _copied_bytes_s(torch_device, _buffer(torch_device), device_buffer),  # read and written
        launch_s=_median_s(torch_device, lambda: [scalar.add_(1) for _ in range(OPERATORS)]) / OPERATORS,
        conditions=conditions_of(device), measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    if device:
        pinned, pageable = (
            min(_copied_bytes_s(torch_device, host, device_buffer), _copied_bytes_s(torch_device, device_buffer, host))
            for host in (_buffer("cpu", pinned=True), _buffer("cpu"))
        )
        attention = _attention_flops(torch_device, dtype)
        rates = replace(rates, attention_flops=attention, pinned_bytes_s=pinned, pageable_bytes_s=pageable)
        if above := [name for name, share in _shares_of_listed(rates, listed_card(device)).items() if share > MOST_OF_LISTED]:
            what = f"{card.name}: {', '.join(above)} measured over 10 % above the catalogue: {_summary(rates)}"
            return Finding("rates", "warn", what, "Nothing is stored. Measure again at the GPU's usual clocks.")
    store_rates(card, rates)
    return Finding("rates", "ok", f"{card.name}: {_summary(rates)}; plans for it use these rates")


def _shares_of_listed(rates: Rates, listed: Card) -> dict[str, float]:
    pairs = {
        "products": (rates.flops, listed.bf16_flops), "attention": (rates.attention_flops, listed.bf16_flops),
        "memory": (rates.bandwidth_bytes_s, listed.bandwidth_bytes_s), "copies": (rates.pinned_bytes_s, listed.pcie_bytes_s),
    }  # fmt: skip
    return {name: rate / published for name, (rate, published) in pairs.items() if rate and published}


def _summary(rates: Rates) -> str:
    flops = {"products": rates.flops, "attention": rates.attention_flops}
    moved = {"memory": rates.bandwidth_bytes_s, "pinned copies": rates.pinned_bytes_s, "pageable": rates.pageable_bytes_s}
    texts = [f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in flops.items() if rate]
    texts += [f"{name} {format_bytes(rate)}/s" for name, rate in moved.items() if rate]
    return f"{', '.join(texts)}, {rates.launch_s * 1e6:.1f} us of host time per operator"


def _attention_flops(torch_device: torch.device, dtype: torch.dtype) -> float:
    query, key, value = (torch.randn(1, 32, 4096, 128, device=torch_device, dtype=dtype, requires_grad=True) for _ in range(3))

    def forward_and_backward() -> None:
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), output)

    # causal attention of 32 heads of 128 over 4,096 tokens: 2 products forward and 5 backward, half of each
    return 7 * 32 * 4096**2 * 128 / _median_s(torch_device, forward_and_backward)


def _buffer(torch_device: torch.device | str, *, pinned: bool = False) -> Tensor:
    return torch.zeros(256 * MIB, device=torch_device, dtype=torch.uint8, pin_memory=pinned)


def _copied_bytes_s(torch_device: torch.device, source: Tensor, target: Tensor) -> float:
    return source.numel() / _median_s(torch_device, lambda: target.copy_(source, non_blocking=True))


def _median_s(torch_device: torch.device, work: Callable[[], object]) -> float:
    times: list[float] = []
    while sum(times[1:]) < MEASURED_S:
        began_s = time.perf_counter()
        work()
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[len(times) // 2 :])  # the second half, when clocks have settled
