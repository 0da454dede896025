"""Check for a C compiler, which Triton needs for its launchers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

COMPILER_FIX = "Install a compiler and Python's headers; on Debian or Ubuntu: sudo apt install gcc libc6-dev python3-dev"
_EXTENSION = "#include <Python.h>\nPyObject *probe(void) { return PyLong_FromLong(1); }\n"


def find_compiler() -> str | None:
    """Return the compiler that Triton would call."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def triton_problem() -> str:
    """Return why Triton can't work, or an empty text; needs no GPU."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return compiler_problem() if sys.platform == "linux" else ""  # the wheel for Windows has a compiler


def compiler_problem() -> str:
    """Return why compiling an extension fails."""
    compiler = find_compiler()
    if compiler is None:
        return "no C compiler"
    headers, name = sysconfig.get_path("include"), Path(compiler).name
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(_EXTENSION, encoding="utf-8")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{headers}", "-o", str(source.with_suffix(".so"))]
        try:
            process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=8, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{name} can't be run: {error}"
    if process.returncode == 0:
        return ""
    if "Python.h" in process.stderr:
        return f"{name} is installed, Python's headers are not (Python.h)"
    reason = next((line for line in process.stderr.splitlines() if "error" in line), process.stderr[:200]).strip()
    return f"{name} can't compile: {reason}"
