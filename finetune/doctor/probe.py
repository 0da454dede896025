"""Trials of torch, bitsandbytes and Triton: `python -m finetune.doctor.probe`."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any

from finetune.card.cuda import try_kernel
from finetune.compat.bitsandbytes import import_without_compiler
from finetune.system import WINDOWS


def main() -> None:
    """Try each part in turn, and print a JSON object for each."""
    # a separate process, so that no CUDA context stays and a crashing library does not end the doctor
    torch_report = _report("torch", try_torch)
    if torch_report["error"] is None:
        _report("bitsandbytes", try_bitsandbytes)
    # torch for Windows comes without Triton
    if torch_report.get("devices") and (not WINDOWS or importlib.util.find_spec("triton")):
        _report("triton", try_kernel)


def try_torch() -> dict[str, Any]:
    """Return torch's build and the GPUs that it sees."""
    import torch

    values: dict[str, Any] = {
        "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
        "architectures": torch.cuda.get_arch_list(), "devices": [], "cuda_error": None,
    }  # fmt: skip
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
            values["devices"] = [
                {"name": device.name, "capability": [device.major, device.minor]}
                for device in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            ]
        except (RuntimeError, AssertionError) as error:
            values["cuda_error"] = str(error).splitlines()[0]
    return values


def try_bitsandbytes() -> dict[str, Any]:
    """Quantise and use a layer as QLoRA does, and on a GPU take an 8-bit optimizer step."""
    import torch

    import_without_compiler()
    from bitsandbytes.nn import Linear4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator)
    rows = torch.randn(8, 512, generator=generator)
    layer = Linear4bit(512, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=True)
    layer.load_state_dict({"weight": weight})
    layer.to(device)  # this quantises
    inputs = rows.to(device).requires_grad_(True)
    answers = layer(inputs)
    answers.square().sum().backward()
    expected = rows @ weight.T
    error = float((answers.detach().cpu() - expected).norm() / expected.norm())
    is_finite = math.isfinite(error) and inputs.grad is not None and bool(torch.isfinite(inputs.grad).all())
    moves = device == "cpu" or _optimizer_steps()
    return {"device": device, "relative_error": error if is_finite else None, "optimizer_moves": moves}


def _report(part: str, attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        values = {"part": part, "error": None, **attempt()}
    except Exception as error:  # noqa: BLE001 - libraries, compilers and drivers each have errors of their own
        traceback.print_exc()
        values = {"part": part, "error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"}
    sys.stdout.write(json.dumps(values) + "\n")
    # the doctor reads the parts that were done before a crash
    sys.stdout.flush()
    return values


def _optimizer_steps() -> bool:
    import torch
    from bitsandbytes.optim import AdamW8bit

    parameter = torch.nn.Parameter(torch.ones(8192, device="cuda"))
    optimizer = AdamW8bit([parameter], lr=0.1)
    parameter.square().sum().backward()
    optimizer.step()
    return bool((parameter < 1).all())


if __name__ == "__main__":
    main()
