"""A C compiler with Python's headers, which Triton needs when a run starts: really tried on a small extension."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from finetune.doctor.finding import Finding

_SOURCE = "#include <Python.h>\nPyObject *probe(void) { return PyLong_FromLong(1); }\n"
_FIX = "Install a compiler and Python's headers; on Debian or Ubuntu: sudo apt install gcc libc6-dev python3-dev"


def check_compiler(include: str | None = None) -> Finding:
    """Compile an extension as Triton does: $CC, else gcc, else clang. `include`: where Python.h is looked for."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Finding("compiler", "warn", "no C compiler; Triton needs one for fast kernels and torch_compile", _FIX)
    headers = include or sysconfig.get_paths()["include"]
    name = Path(compiler).name
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(_SOURCE)
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{headers}", "-o", str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=8, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding("compiler", "warn", f"{name} can't be run: {error}", _FIX)
    if done.returncode == 0:
        return Finding("compiler", "ok", f"{name} compiles Python extensions")
    if "Python.h" in done.stderr:
        return Finding("compiler", "warn", f"{name} is there, Python's headers are not (Python.h)", _FIX)
    said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200]).strip()
    return Finding("compiler", "warn", f"{name} can't compile: {said}", _FIX)
