"""Checks of package versions, the C compiler, and libraries in use."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.card import nvidia
from finetune.card.compiler import COMPILER_FIX, compiler_problem, find_compiler
from finetune.card.nvidia import WHEEL_FIX, Build, DriverError
from finetune.doctor.findings import Finding
from finetune.model.hybrid import FLA, reference_notes
from finetune.printable import Progress
from finetune.requirements import how_to_install, packages
from finetune.system import WINDOWS

_FIXES = {
    "torch": "pip install --force-reinstall torch",
    "bitsandbytes": "pip install --force-reinstall bitsandbytes; without it: load_in_4bit=false load_in_8bit=false "
    "optim=adamw_torch",
    "triton": "See the line `compiler`; then pip install --force-reinstall triton",
}
#: NF4 in blocks of 64 has a relative error of 9 % on normally distributed weights. Half and twice this error are a fault.
QUANTISATION_ERRORS = 0.045, 0.18


def check_packages() -> Finding:
    """Check the versions of the dependencies."""
    every = packages(extra="ui")
    if not every:
        fix = "Install it: pip install -e '.[ui]' in the checkout."
        return Finding("packages", "warn", "finetune runs from its source, not installed, so versions are not checked", fix)
    # the page's dependencies count only where they are installed
    wanted = [package for package in every if package.installed or "extra" not in str(package.requirement.marker)]
    installed = {package.requirement.name: package.installed for package in wanted}
    python = sys.version.split()[0]
    facts = {"finetune": __version__, "python": python, **installed}
    wrong = [package for package in wanted if not package.fits]
    if not wrong:
        libraries = ", ".join(f"{name} {installed.get(name)}" for name in ("torch", "transformers"))
        what = f"finetune {__version__}, python {python}, {libraries}"
        return Finding("packages", "ok", what, facts=facts)
    return Finding("packages", "fail", "; ".join(map(str, wrong)), how_to_install(wrong), facts)


def check_compiler() -> Finding:
    """Compile an extension as Triton does."""
    if WINDOWS:
        return Finding("compiler", "skip", "only Triton needs a compiler, and torch for Windows comes without Triton")
    if problem := compiler_problem():
        what = f"{problem}; Triton needs one for fast kernels and torch_compile" if find_compiler() is None else problem
        return Finding("compiler", "warn", what, COMPILER_FIX)
    return Finding("compiler", "ok", f"{Path(find_compiler() or '').name} compiles Python extensions")


def check_stack(deadline_s: float, progress: Progress) -> Iterator[Finding]:
    """Check torch, bitsandbytes and Triton in a separate process."""
    parts, problem, hung = run_probe(deadline_s, progress)
    for name, (check, findings_of) in _PARTS.items():
        part = parts.get(name)
        if part is not None and part["error"] is None:
            yield from findings_of(part)
        elif part is not None:
            yield Finding(check, "fail", f"{name} can't be used: {part['error']}", _FIXES[name])
            if name == "torch":
                return
        elif problem:  # it hung or crashed in this part; later parts were not tried
            state, fix = ("warn", "Run it again when the machine is less busy.") if hung else ("fail", _FIXES[name])
            yield Finding(check, state, f"{name}: {problem}", fix)
            return
        else:
            yield Finding(check, "skip", "torch for Windows comes without it" if WINDOWS else "no GPU to compile for")


def run_probe(deadline_s: float, progress: Progress) -> tuple[dict[str, dict[str, Any]], str, bool]:
    """Run `probe`. Return its reports by part, the problem or "", and whether it timed out."""
    # -P: a torch.py in the working directory must not be imported
    command = [sys.executable, "-P", "-m", "finetune.doctor.probe"]
    progress("trying torch, bitsandbytes and Triton")
    try:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as hung:
        return _parts(hung.output or b""), f"no answer within {deadline_s:.0f} s", True
    return _parts(process.stdout), _problem(process.returncode, process.stderr), False


def _parts(output: bytes) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith(b'{"part"') and line.endswith(b"}")]
    return {line.pop("part"): line for line in lines}


def _problem(code: int, errors: bytes) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"ended with status {code}"


def _torch_findings(part: dict[str, Any]) -> Iterator[Finding]:
    driver = None
    with contextlib.suppress(DriverError):
        driver = nvidia.driver_versions()
    yield cuda_finding(part, driver)
    yield from (architecture_finding(part, device) for device in part["devices"])


def cuda_finding(part: dict[str, Any], driver: nvidia.Driver | None) -> Finding:
    """Return a finding on CUDA from the probe's report on torch."""
    version, facts = f"torch {part['version']}", {key: part[key] for key in ("version", "cuda", "architectures")}
    build = Build(part["version"], part["cuda"], part["hip"])
    # such as ROCm
    if build.platform and not build.cuda:
        return Finding("cuda", "warn", f"{version} is built for {build.platform}, which is not tested", facts=facts)
    if part["devices"]:
        names = ", ".join(device["name"] for device in part["devices"])
        return Finding("cuda", "ok", f"{version} with {build.platform} sees {names}", facts=facts)
    if driver is None:
        kind = f"built for {build.platform}" if build.platform else "a CPU-only build"
        return Finding("cuda", "skip", f"{version}, {kind}; no driver", facts=facts)
    if problem := nvidia.build_problem(build, driver):
        return Finding("cuda", "fail", *problem, facts)
    fix = f"Is {nvidia.VISIBLE_VARIABLE} set? {nvidia.CONTAINER_FIX}"
    what = f"{version} sees no GPU, although the driver answers: {part['cuda_error'] or 'none is visible'}"
    return Finding("cuda", "fail", what, fix, facts)


def architecture_finding(part: dict[str, Any], device: dict[str, Any]) -> Finding:
    """Check that the torch wheel has kernels for a GPU."""
    major, minor = device["capability"]
    facts = {"name": device["name"], "capability": device["capability"], "architectures": part["architectures"]}
    card = f"{device['name']} (compute capability {major}.{minor})"
    if nvidia.has_kernels((major, minor), part["architectures"]):
        kernels = "".join(reference_notes("qwen3_5", (major, minor))) or f"the kernels of {FLA.name}"
        what = f"the torch wheel has kernels for {card}; Qwen3.5 and other delta nets use {kernels}"
        return Finding("architecture", "ok", what, facts=facts)
    built_for = " ".join(part["architectures"]) or "no architecture"
    what = f"torch {part['version']} has no kernels for {card}; it is built for {built_for}"
    return Finding("architecture", "fail", what, WHEEL_FIX, facts)


def _bitsandbytes_findings(part: dict[str, Any]) -> Iterator[Finding]:
    where, error = "the GPU" if part["device"] == "cuda" else "the CPU", part["relative_error"]
    if not part["optimizer_moves"]:
        what = f"on {where}: a step of the 8-bit optimizer changes nothing"
        yield Finding("bitsandbytes", "fail", what, _FIXES["bitsandbytes"], part)
    elif error is not None and QUANTISATION_ERRORS[0] < error < QUANTISATION_ERRORS[1]:
        what = f"quantises to 4 bit on {where}; relative error {error:.1%}, as expected of NF4"
        yield Finding("bitsandbytes", "ok", what, facts=part)
    else:
        off_by = "or its gradient is NaN" if error is None else f"is off by {error:.0%}, which NF4 is not"
        yield Finding("bitsandbytes", "fail", f"on {where}: the output of a 4-bit layer {off_by}", _FIXES["bitsandbytes"], part)


def _triton_findings(part: dict[str, Any]) -> Iterator[Finding]:
    if part["numbers_are_right"]:
        yield Finding("triton", "ok", "compiles a kernel and runs it on the GPU")
    else:
        yield Finding("triton", "fail", "a compiled kernel gives wrong results", _FIXES["triton"])


#: Part of the probe -> the name of its check, and its findings.
_PARTS = {
    "torch": ("cuda", _torch_findings),
    "bitsandbytes": ("bitsandbytes", _bitsandbytes_findings),
    "triton": ("triton", _triton_findings),
}
