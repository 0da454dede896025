"""Machines with NVIDIA's driver where there is none: a library with NVML's interface, and a description of each machine."""

import ctypes
import os
import platform
import subprocess
from pathlib import Path

import pynvml
import pytest
import torch

from finetune.card import nvidia

HERE = Path(__file__).parent
NOT_A_CONTAINER = str(Path("/proc/self/ns/pid").readlink()) if Path("/proc/self/ns/pid").is_symlink() else ""


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory):
    """Folder of a libnvidia-ml.so.1 whose machine the environment names."""
    folder = tmp_path_factory.mktemp("driver")
    source = HERE.parents[1] / "standin_gpu" / "src" / "nvml.c"
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def machine(driver_library, monkeypatch, tmp_path):
    """machine("t4") -> this process is on that machine, with that driver; `more` are lines for its last card.

    The binding (ctypes) and all that uses it are the real ones. `cuda`: what the installed torch is built for.
    """

    def enter(name, *more, cuda="13.0", **environment):
        description = tmp_path / f"{name}.machine"
        description.write_text((HERE / f"{name}.machine").read_text() + "".join(f"{line}\n" for line in more))
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(driver_library / "libnvidia-ml.so.1")))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(nvidia, "FIRST_NAMESPACE", "another" if name == "container" else NOT_A_CONTAINER)
        if name == "wsl":
            monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
        for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in {"STAND_IN_MACHINE": str(description), **environment}.items():
            monkeypatch.setenv(variable, value)
        return {**os.environ, "LD_LIBRARY_PATH": str(driver_library)}

    return enter
