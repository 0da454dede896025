"""Checks of GPUs, host memory, disk, packages and the C compiler."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from finetune import __version__
from finetune.card import nvidia
from finetune.card.find import find_card
from finetune.card.nvidia import Device, DriverError
from finetune.card.visible import visible, visible_devices
from finetune.compat.triton import COMPILER_FIX, compiler_problem, find_compiler
from finetune.doctor import BUSY_FIX, PARTS, Finding
from finetune.files import existing_parent, free_disk_bytes
from finetune.requirements import how_to_install, packages
from finetune.system import WINDOWS
from finetune.units import GIB, Progress, format_bytes

_NO_CARD_FIX = (
    "Without a GPU: plan for one (finetune plan RECIPE --gpu rtx-4090), or train the bundled model on the CPU "
    "(finetune run tiny-cpu)."
)
MOST_IN_USE = 0.15  # a larger share of a GPU's memory in use is worth a warning
#: Less than the first is a warning; with less than the second the libraries and the bundled model hardly fit.
RECOMMENDED_MEMORY_BYTES, MINIMUM_MEMORY_BYTES = 8 * GIB, 2 * GIB
#: The weights of a 7B model are 15 GB in 16 bit; checkpoints and the adapter come on top.
RECOMMENDED_DISK_BYTES, MINIMUM_DISK_BYTES = 20 * GIB, GIB


def check_driver() -> Finding:
    """Check that the GPU driver answers."""
    try:
        driver, cuda = nvidia.driver_versions()
    except DriverError as error:
        reason = str(error).rstrip(".")
        if error.was_updated:
            return Finding("driver", "fail", f"the driver was updated while in use ({reason})", "Restart the machine.")
        fix = f"Install the driver of an NVIDIA GPU and restart. {nvidia.CONTAINER_FIX} {_NO_CARD_FIX}"
        return Finding("driver", "warn", f"no NVIDIA GPU whose driver answers ({reason})", fix)
    return Finding("driver", "ok", f"{driver}, supports CUDA up to {cuda[0]}.{cuda[1]}")


def check_cards() -> Iterator[Finding]:
    """Check each GPU's free memory and visibility."""
    try:
        # through NVML, which creates no context and so allocates nothing on a GPU
        devices, lost_cards = nvidia.read_devices()
    except DriverError:
        yield Finding("card memory", "skip", "no GPU")
        return
    if not devices and not lost_cards:
        yield Finding("card memory", "warn", "the driver sees no GPU", _NO_CARD_FIX)
    allowed = visible(devices)
    for device in devices:
        yield _card_finding(device, hidden=device not in allowed)
    for card in lost_cards:
        yield Finding("card memory", "fail", f"GPU {card.index} can't be used ({card.why})", card.fix)


def _card_finding(device: Device, *, hidden: bool) -> Finding:
    used_bytes = device.total_bytes - device.free_bytes
    what = f"{device.index}: {device.name}: {format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free"
    if hidden:
        return Finding("card memory", "skip", f"{what}; hidden by {nvidia.VISIBLE_VARIABLE}={visible_devices()!r}")
    if used_bytes <= MOST_IN_USE * device.total_bytes:
        return Finding("card memory", "ok", what)
    fix = "Close programs on this GPU that you don't need: a plan uses only free memory."
    by = f" by {', '.join(device.holders[:6])}" if device.holders else ""
    return Finding("card memory", "warn", f"{what}; {format_bytes(used_bytes)} in use{by}", fix)


def check_memory() -> Finding:
    """Check host memory, within a container's limit."""
    host = find_card("cpu")
    what = f"{format_bytes(host.free_bytes)} of {format_bytes(host.total_bytes)} available"
    if host.free_bytes >= RECOMMENDED_MEMORY_BYTES:
        return Finding("host memory", "ok", what)
    fix = "Close other programs. WSL gets half the host memory: raise memory= in .wslconfig. In a container, raise its limit."
    if host.free_bytes >= MINIMUM_MEMORY_BYTES:
        return Finding("host memory", "warn", f"{what}; loading a large model may be slow or get killed", fix)
    return Finding("host memory", "fail", f"{what}; a run needs at least {format_bytes(MINIMUM_MEMORY_BYTES)}", fix)


def check_disk() -> Iterator[Finding]:
    """Check free space and write permission for runs and the hub cache."""
    from huggingface_hub import constants

    for use, folder in (("runs", Path.cwd()), ("hub cache", Path(constants.HF_HUB_CACHE))):
        existing, free = existing_parent(folder), free_disk_bytes(folder)
        what = f"{use}: {format_bytes(free)} free at {existing}"
        if not _is_writable(existing):
            fix = f"Take ownership (sudo chown -R $USER {existing}), or choose another folder."
            yield Finding("disk", "fail", f"{use}: {existing} can't be written to", fix)
        elif free < MINIMUM_DISK_BYTES:
            fix = "Delete old checkpoints in runs/ and unused models (`hf cache ls`, `hf cache rm`)."
            yield Finding("disk", "fail", what, fix)
        elif free < RECOMMENDED_DISK_BYTES:
            fix = "A 7B model's weights alone take 15 GB: free some space, or set output_dir and HF_HOME to another disk."
            yield Finding("disk", "warn", what, fix)
        else:
            yield Finding("disk", "ok", what)


def check_spill() -> Finding:
    """Check whether the driver falls back to system memory when the GPU is full."""
    # With the fallback, on Windows and under WSL, a run is 10 to 50 times slower instead of running out of memory.
    # The driver's setting can't be read from here.
    wsl = "microsoft" in platform.release().lower()
    if platform.system() != "Windows" and not wsl:
        what = f"{platform.system()}: a full GPU raises an out-of-memory error, without fallback to system memory"
        return Finding("spill", "ok", what)
    driver = "WSL: the Windows driver" if wsl else "Windows: the driver"
    program = " (on Windows, for python)" if wsl else f", for {Path(sys.executable).name}"
    fix = f"NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback{program}."
    what = f"{driver} may fall back to system memory when the GPU is full, which is 10 to 50 times slower"
    return Finding("spill", "warn", what, fix)


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):  # permission bits don't show read-only mounts and network shares
            return True
    except OSError:
        return False


def check_packages() -> Finding:
    """Check the versions of the dependencies."""
    required = packages(extra="ui")
    if not required:
        fix = "Install it: pip install -e '.[ui]' in the checkout."
        return Finding("packages", "warn", "finetune runs from its source, not installed, so versions are not checked", fix)
    # the page's dependencies count only where they are installed
    checked = [package for package in required if package.installed or "extra" not in str(package.requirement.marker)]
    installed = {package.requirement.name: package.installed for package in checked}
    unfit = [package for package in checked if not package.is_supported]
    if not unfit:
        libraries = ", ".join(f"{name} {installed.get(name)}" for name in ("torch", "transformers"))
        return Finding("packages", "ok", f"finetune {__version__}, python {sys.version.split()[0]}, {libraries}")
    return Finding("packages", "fail", "; ".join(map(str, unfit)), how_to_install(unfit))


def check_compiler() -> Finding:
    """Compile an extension as Triton does."""
    if WINDOWS:
        return Finding("compiler", "skip", "only Triton needs a compiler, and torch for Windows comes without Triton")
    if problem := compiler_problem():
        what = f"{problem}; Triton needs one for fast kernels and torch_compile" if find_compiler() is None else problem
        return Finding("compiler", "warn", what, COMPILER_FIX)
    return Finding("compiler", "ok", f"{Path(find_compiler() or '').name} compiles Python extensions")


def check_stack(progress: Progress, deadline_s: float = 180) -> Iterator[Finding]:
    """Check torch, bitsandbytes and Triton in a separate process. Imports take long on a busy machine or from a slow disk."""
    # -P: a torch.py in the working directory must not be imported
    command = [sys.executable, "-P", "-m", "finetune.doctor.probe"]
    progress("trying torch, bitsandbytes and Triton")
    try:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False)
        output, problem, hung = process.stdout, _exit_problem(process.returncode, process.stderr), False
    except subprocess.TimeoutExpired as error:
        output, problem, hung = error.output or b"", f"no answer within {deadline_s:.0f} s", True
    # libraries print, too, and a crash can cut a line off
    reports = [json.loads(line) for line in output.splitlines() if line.startswith(b'{"part"') and line.endswith(b"}")]
    yield from (Finding(**values) for report in reports for values in report["findings"])
    if problem and len(reports) < len(PARTS):  # it hung or crashed in this part; later parts were not tried
        part, (check, fix) = list(PARTS.items())[len(reports)]
        state, fix = ("warn", BUSY_FIX) if hung else ("fail", fix)
        yield Finding(check, state, f"{part}: {problem}", fix)


def _exit_problem(code: int, errors: bytes) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"ended with status {code}"
