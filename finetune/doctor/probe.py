"""Trials of torch, bitsandbytes and Triton: `python -m finetune.doctor.probe`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from finetune.card import nvidia
from finetune.card.cuda import try_kernel
from finetune.card.nvidia import WHEEL_FIX, Build, DriverError
from finetune.compat.bitsandbytes import import_without_compiler
from finetune.doctor import PARTS, Finding
from finetune.model.hybrid import FLA, kernel_fallback_notes
from finetune.system import WINDOWS

#: NF4 in blocks of 64 has a relative error of 9 % on normally distributed weights. Half and twice this error are a fault.
QUANTISATION_ERRORS = 0.045, 0.18


def main() -> None:
    """Try each part in turn, and print a JSON object with its findings."""
    # a separate process, so that no CUDA context stays and a crashing library does not end the doctor
    if _report("torch", try_torch):
        _report("bitsandbytes", lambda: [try_bitsandbytes()])
        _report("triton", lambda: [try_triton()])


def _report(part: str, attempt: Callable[[], Iterable[Finding]]) -> bool:
    findings, works = list[Finding](), True
    try:
        findings += attempt()
    except Exception as error:  # noqa: BLE001 - libraries, compilers and drivers each have errors of their own
        traceback.print_exc()
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
        check, fix = PARTS[part]
        findings, works = [Finding(check, "fail", f"{part} can't be used: {reason}", fix)], False
    # printed part by part: after a crash the doctor still reads the earlier parts
    print(json.dumps({"part": part, "findings": [asdict(finding) for finding in findings]}), flush=True)  # noqa: T201
    return works


def try_torch() -> Iterable[Finding]:
    """Yield findings on torch's build and the GPUs it sees."""
    import torch

    report: dict[str, Any] = {
        "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
        "architectures": torch.cuda.get_arch_list(), "devices": [], "cuda_error": None,
    }  # fmt: skip
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
            report["devices"] = [
                {"name": device.name, "capability": [device.major, device.minor]}
                for device in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            ]
        except (RuntimeError, AssertionError) as error:
            report["cuda_error"] = str(error).splitlines()[0]
    driver = None
    with contextlib.suppress(DriverError):
        driver = nvidia.driver_versions()
    yield cuda_finding(report, driver)
    yield from (architecture_finding(report, device) for device in report["devices"])


def cuda_finding(report: dict[str, Any], driver: nvidia.Driver | None) -> Finding:
    """Check that torch sees a GPU."""
    version = f"torch {report['version']}"
    build = Build(report["version"], report["cuda"], report["hip"])
    if build.platform and not build.cuda:  # such as ROCm
        return Finding("cuda", "warn", f"{version} is built for {build.platform}, which is not tested")
    if report["devices"]:
        names = ", ".join(device["name"] for device in report["devices"])
        return Finding("cuda", "ok", f"{version} with {build.platform} sees {names}")
    if driver is None:
        kind = f"built for {build.platform}" if build.platform else "a CPU-only build"
        return Finding("cuda", "skip", f"{version}, {kind}; no driver")
    if problem := nvidia.build_problem(build, driver):
        return Finding("cuda", "fail", *problem)
    fix = f"Is {nvidia.VISIBLE_VARIABLE} set? {nvidia.CONTAINER_FIX}"
    what = f"{version} sees no GPU, although the driver answers: {report['cuda_error'] or 'none is visible'}"
    return Finding("cuda", "fail", what, fix)


def architecture_finding(report: dict[str, Any], device: dict[str, Any]) -> Finding:
    """Check that the torch wheel has kernels for a GPU."""
    major, minor = device["capability"]
    card = f"{device['name']} (compute capability {major}.{minor})"
    if nvidia.has_kernels((major, minor), report["architectures"]):
        kernels = "".join(kernel_fallback_notes("qwen3_5", (major, minor))) or f"the kernels of {FLA.name}"
        what = f"the torch wheel has kernels for {card}; Qwen3.5 and other delta nets use {kernels}"
        return Finding("architecture", "ok", what)
    built_for = " ".join(report["architectures"]) or "no architecture"
    what = f"torch {report['version']} has no kernels for {card}; it is built for {built_for}"
    return Finding("architecture", "fail", what, WHEEL_FIX)


def try_bitsandbytes() -> Finding:
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
    outputs = layer(inputs)
    outputs.square().sum().backward()
    expected = rows @ weight.T
    error = float((outputs.detach().cpu() - expected).norm() / expected.norm())
    is_finite = math.isfinite(error) and inputs.grad is not None and bool(torch.isfinite(inputs.grad).all())
    where, (check, fix) = "the GPU" if device == "cuda" else "the CPU", PARTS["bitsandbytes"]
    if device == "cuda" and not _optimizer_changes_weights():
        return Finding(check, "fail", f"on {where}: a step of the 8-bit optimizer changes nothing", fix)
    if is_finite and QUANTISATION_ERRORS[0] < error < QUANTISATION_ERRORS[1]:
        return Finding(check, "ok", f"quantises to 4 bit on {where}; relative error {error:.1%}, as expected of NF4")
    off_by = f"is off by {error:.0%}, which NF4 is not" if is_finite else "or its gradient is NaN"
    return Finding(check, "fail", f"on {where}: the output of a 4-bit layer {off_by}", fix)


def _optimizer_changes_weights() -> bool:
    import torch
    from bitsandbytes.optim import AdamW8bit

    parameter = torch.nn.Parameter(torch.ones(8192, device="cuda"))
    optimizer = AdamW8bit([parameter], lr=0.1)
    parameter.square().sum().backward()
    optimizer.step()
    return bool((parameter < 1).all())


def try_triton() -> Finding:
    """Compile and run a kernel."""
    import torch

    check, fix = PARTS["triton"]
    if WINDOWS and not importlib.util.find_spec("triton"):
        return Finding(check, "skip", "torch for Windows comes without it")
    if not torch.cuda.is_available():
        return Finding(check, "skip", "no GPU to compile for")
    if try_kernel():
        return Finding(check, "ok", "compiles a kernel and runs it on the GPU")
    return Finding(check, "fail", "a compiled kernel gives wrong results", fix)


if __name__ == "__main__":
    main()
