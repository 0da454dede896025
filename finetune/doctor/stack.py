"""torch, its fit to the card, bitsandbytes and Triton, tried in a process of their own (finetune.doctor.probe)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pynvml

from finetune.card.nvidia import driver_versions
from finetune.doctor.finding import Finding

_WHEEL_FIX = (
    "Install the wheel for your card: uv pip install --reinstall --torch-backend=auto torch, or choose one at "
    "https://pytorch.org/get-started/locally/"
)
_FIXES = {
    "torch": "pip install --force-reinstall torch",
    "bitsandbytes": "pip install --force-reinstall bitsandbytes; without it: load_in_4bit=false load_in_8bit=false "
    "optim=adamw_torch",
    "triton": "See the line `compiler`; then pip install --force-reinstall triton",
}
#: NF4 in blocks of 64 leaves 9 % of a normal weight's size as error. Twice that is something else.
MOST_QUANTISATION_ERROR = 0.18
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d{2,3})([af]?)")


def check_stack(deadline_s: float) -> Iterator[Finding]:
    """Does torch see the card, does its wheel hold code for it, does bitsandbytes quantise, does Triton compile?"""
    parts, ended = ask(deadline_s)
    for name in ("torch", "bitsandbytes", "triton"):
        seen = parts.get(name)
        if seen is not None and seen["error"] is None:
            yield from _JUDGES[name](seen)
        elif seen is not None:
            yield Finding(_NAMES[name], "fail", f"{name} can't be used: {seen['error']}", _FIXES[name])
            if name == "torch":
                return
        elif ended:  # it hung or crashed here, and nothing after it was tried
            state, fix = (
                ("warn", "Run it again when the machine is less busy.") if "within" in ended else ("fail", _FIXES[name])
            )
            yield Finding(_NAMES[name], state, f"{name}: {ended}", fix)
            return
        else:
            yield Finding(_NAMES[name], "skip", "no card to compile for")


def _judge_torch(seen: dict[str, Any]) -> Iterator[Finding]:
    yield cuda_finding(seen, _driver())
    yield from (architecture_finding(seen, device) for device in seen["devices"])


def cuda_finding(seen: dict[str, Any], driver: tuple[str, tuple[int, int]] | None) -> Finding:
    """`seen`: what the probe says of torch. `driver`: its version and newest CUDA, None without one."""
    version, facts = f"torch {seen['version']}", {key: seen[key] for key in ("version", "cuda", "architectures")}
    if seen["devices"]:
        names = ", ".join(device["name"] for device in seen["devices"])
        return Finding("cuda", "ok", f"{version} with CUDA {seen['cuda']} sees {names}", facts=facts)
    if seen["hip"]:
        return Finding("cuda", "warn", f"{version} is a ROCm build, which nobody has tried here", facts=facts)
    if driver is None:
        kind = "a build for processors" if seen["cuda"] is None else f"built for CUDA {seen['cuda']}"
        return Finding("cuda", "skip", f"{version}, {kind}; no driver to use a card with", facts=facts)
    if seen["cuda"] is None:
        return Finding("cuda", "fail", f"{version} is a build for processors; the card is not used", _WHEEL_FIX, facts)
    if int(seen["cuda"].split(".")[0]) > driver[1][0]:
        what = f"{version} is built for CUDA {seen['cuda']}, driver {driver[0]} runs CUDA {driver[1][0]}.{driver[1][1]} at most"
        return Finding("cuda", "fail", what, f"Update the driver, or install an older wheel. {_WHEEL_FIX}", facts)
    fix = "Is CUDA_VISIBLE_DEVICES set? In a container: was it started with --gpus all?"
    what = f"{version} sees no card, though the driver answers: {seen['cuda_error'] or 'none is visible'}"
    return Finding("cuda", "fail", what, fix, facts)


def architecture_finding(seen: dict[str, Any], device: dict[str, Any]) -> Finding:
    """Does the wheel hold code for this card?"""
    major, minor = device["capability"]
    facts = {"name": device["name"], "capability": device["capability"], "architectures": seen["architectures"]}
    card = f"{device['name']} (compute capability {major}.{minor})"
    if runs_on((major, minor), seen["architectures"]):
        return Finding("architecture", "ok", f"the wheel has code for {card}", facts=facts)
    what = f"torch {seen['version']} has no code for {card}; it has {' '.join(seen['architectures']) or 'none'}"
    return Finding("architecture", "fail", what, _WHEEL_FIX, facts)


def runs_on(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a wheel built for `architectures` (`sm_86`, `sm_90a`, `compute_120`) has code that a card of `capability` runs.

    Binaries (sm) run on the same major and a later minor version, intermediate code (compute) on all later ones; with an `a`
    at the end on that one only, with an `f` within its family (CUDA programming guide, "Compute Capability").
    """
    for kind, number, feature in (match.groups() for match in map(_ARCHITECTURE.fullmatch, architectures) if match):
        built = (int(number[:-1]), int(number[-1]))
        if feature == "a":
            fits = built == capability
        elif kind == "sm" or feature == "f":
            fits = built[0] == capability[0] and built <= capability
        else:
            fits = built <= capability
        if fits:
            return True
    return False


def _judge_bitsandbytes(seen: dict[str, Any]) -> Iterator[Finding]:
    where = "the card" if seen["device"] == "cuda" else "the processor"
    wrong = list(_wrong_numbers(seen))
    if wrong:
        yield Finding("bitsandbytes", "fail", f"on {where}: {'; '.join(wrong)}", _FIXES["bitsandbytes"], seen)
    else:
        what = f"quantises to 4 bit on {where}, error {seen['relative_error']:.1%} as expected of NF4"
        yield Finding("bitsandbytes", "ok", what, facts=seen)


def _wrong_numbers(seen: dict[str, Any]) -> Iterator[str]:
    error = seen["relative_error"]
    if seen["stored_bytes"] * 2 != seen["weights"]:
        yield f"{seen['weights']} weights take {seen['stored_bytes']} bytes, not half as many"
    if error is None or error > MOST_QUANTISATION_ERROR:
        yield "a 4-bit layer gives NaN" if error is None else f"a 4-bit layer is off by {error:.0%}"
    if not seen["gradient_is_finite"]:
        yield "no gradient passes through a 4-bit layer"
    if seen["optimizer_moved"] is False:
        yield "the 8-bit optimizer does not step"


def _judge_triton(seen: dict[str, Any]) -> Iterator[Finding]:
    if seen["numbers_are_right"]:
        yield Finding("triton", "ok", "compiles a kernel and runs it on the card")
    else:
        yield Finding("triton", "fail", "a kernel gives wrong numbers", _FIXES["triton"])


_JUDGES = {"torch": _judge_torch, "bitsandbytes": _judge_bitsandbytes, "triton": _judge_triton}
_NAMES = {"torch": "cuda", "bitsandbytes": "bitsandbytes", "triton": "triton"}


def ask(deadline_s: float) -> tuple[dict[str, dict[str, Any]], str]:
    """Run the probe. Returns what it said, by part, and how it ended when it didn't end well; what came before that counts."""
    command = [sys.executable, "-m", "finetune.doctor.probe"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            return _parts(output), f"no answer within {deadline_s:.0f} s"
    return _parts(output), _problem(process.returncode, errors)


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


def _driver() -> tuple[str, tuple[int, int]] | None:
    try:
        return driver_versions()
    except pynvml.NVMLError:
        return None
