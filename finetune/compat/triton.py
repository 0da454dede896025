"""Patches of Triton, as of 3.7.1, and a check for the C compiler that its launchers need."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from finetune.compat import replace, wrap

_L2_FLUSH = "triton.backends.nvidia.driver.CudaDriver.get_empty_cache_for_benchmark"


@contextmanager
def fake_launches() -> Iterator[None]:
    """Temporarily skip launches of Triton kernels with fake tensors."""
    with ExitStack() as stack:
        if "triton.runtime.jit" in sys.modules:
            # every launcher inherits it
            stack.enter_context(wrap("triton.runtime.jit.KernelInterface.__getitem__", _unless_fake))
        if "mamba_ssm" in sys.modules:
            stack.enter_context(replace("torch.cuda.device", lambda index: nullcontext()))
            # as an RTX 4090, which gives mamba-ssm two buffers of 16 MiB in Granite 4 H micro (2,048 tokens); an RTX 3090, with
            # 82 multiprocessors, gives 10 MiB
            properties = SimpleNamespace(multi_processor_count=128)
            stack.enter_context(replace("torch.cuda.get_device_properties", lambda device: properties))
        yield


def _unless_fake(launcher: Callable[[Any, Any], Any], kernel: Any, grid: Any) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor

    def launch(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
            return launcher(kernel, grid)(*args, **kwargs)
        # nothing to compute: the Python code before the launch has allocated the outputs
        if configs := getattr(kernel, "configs", None):
            kernel.best_config = configs[0]  # mamba-ssm reads the tile size of a tuned kernel
        return None

    return launch


def tune_without_buffer() -> None:
    """Tune kernels without flushing the L2 cache until the process ends."""
    import torch

    # flushing would allocate 256 MiB
    replace(_L2_FLUSH, lambda driver: torch.empty(0, device="cuda"))


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
