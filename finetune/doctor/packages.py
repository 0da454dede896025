"""Checks of package versions, the C compiler, and libraries in use."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from finetune import __version__
from finetune.card.compiler import COMPILER_FIX, compiler_problem, find_compiler
from finetune.doctor.findings import BUSY_FIX, PARTS, Finding
from finetune.requirements import how_to_install, packages
from finetune.system import WINDOWS
from finetune.units import Progress


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
