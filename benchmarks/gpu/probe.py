"""Facts about the GPU that forecast and speed model assume: `python -m benchmarks.gpu.probe`, a JSON line for each.

A failed part is recorded with its error. Without a GPU, most parts say so.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pynvml

from finetune.card.visible import usable_devices

NEEDS_CARD = "needs a card"
PACKAGES = (
    "torch", "triton", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "tokenizers", "pydantic",
    "nvidia-cudnn-cu13",
)  # fmt: skip


def versions() -> dict[str, Any]:
    """Return versions and the machine; None for missing packages."""
    import torch

    packages: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    facts = {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.platform(), "packages": packages}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        facts |= {
            "card": card.name, "capability": [card.major, card.minor], "total_bytes": card.total_memory,
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
            "cards": torch.cuda.device_count(), "uuid": str(card.uuid),
        }  # fmt: skip
    return facts


def context() -> dict[str, Any]:
    """Bytes of the card in use before a context, with one, after a matmul and after bitsandbytes, by NVML's two calls."""
    import torch

    if not torch.cuda.is_available():
        raise LookupError(NEEDS_CARD)
    stages = {"before": nvml()}
    torch.zeros(1, device="cuda")
    stages["context"] = nvml()
    matrix = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    matrix @ matrix
    torch.cuda.synchronize()
    stages["after_matmul"] = nvml()
    import bitsandbytes.functional as quantisation

    codes, state = quantisation.quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
    quantisation.dequantize_4bit(codes, state)
    torch.cuda.synchronize()
    stages["after_bitsandbytes"] = nvml()
    return stages


def nvml() -> dict[str, int]:
    """What NVML's two memory calls report for the first visible card, and what torch has reserved; makes no CUDA context."""
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(usable_devices()[0].uuid)
    reserved = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
    first = pynvml.nvmlDeviceGetMemoryInfo(handle)  # `used` includes the driver's reserve
    second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return {
        "v1_used_bytes": first.used, "v1_total_bytes": first.total,
        "v2_used_bytes": second.used, "v2_total_bytes": second.total, "v2_reserved_bytes": second.reserved,
        "torch_reserved_bytes": reserved, "outside_torch_bytes": second.used - reserved,
    }  # fmt: skip


def rates() -> dict[str, Any]:
    """Return the GPU's rates, which `finetune doctor --measure` also stores for plans."""
    from finetune.doctor.rates import measure_rates

    finding = measure_rates(lambda _: None)[0]
    return finding.facts or {"error": finding.what}


def attention() -> dict[str, Any]:
    """Return torch's choice of attention by head width and form: kernel, milliseconds, scratch bytes of the backward pass."""
    import torch

    kernels = {}
    for choice in ("default", "without cuDNN"):
        if choice != "default":
            torch.backends.cuda.enable_cudnn_sdp(False)
        for width in (64, 128, 256):
            for form in ("plain", "grouped", "masked", "grouped and masked"):
                kernels[f"{choice}, {form}, {width}"] = _or_error(lambda width=width, form=form: one_attention(width, form))
    return kernels


def one_attention(width: int, form: str) -> dict[str, Any]:
    """One scaled dot product attention, forward and backward."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, heads = (2048, 16) if device == "cuda" else (64, 4)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(2, count, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    query, key, value = draw(heads), *(draw(heads // 4 if "grouped" in form else heads) for _ in range(2))
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None] if "masked" in form else None

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa="grouped" in form
        )

    out = forward()
    picked = type(out.grad_fn).__name__.removeprefix("ScaledDotProduct").removesuffix("Backward0")
    gradient = torch.ones_like(out)

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), gradient)

    took_s = timed(both, 3)
    scratch = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, (query, key, value), gradient)
        scratch = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
    return {"kernel": picked, "ms": 1000 * took_s, "backward_scratch_bytes": scratch}


def timed(work: Callable[[], Any], count: int) -> float:
    """Return the mean seconds of `work`, without the first call."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    work()
    wait()
    began = time.perf_counter()
    for _ in range(count):
        work()
    wait()
    return (time.perf_counter() - began) / count


def _or_error(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - recorded
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    """Print each part when it is done."""
    for part in (context, versions, rates, attention):  # the first must find no CUDA context
        began = time.perf_counter()
        facts = _or_error(part)
        print(json.dumps({"part": part.__name__, "took_s": time.perf_counter() - began, **facts}), flush=True)


if __name__ == "__main__":
    main()
