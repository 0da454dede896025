"""Make a Python environment with torch's CUDA build and the stand-in libraries instead of NVIDIA's.

All other packages come from an environment that is there: torch and triton are found before its own. So it takes a download of
half a gigabyte and a minute.
"""

import re
import shutil
import subprocess
from pathlib import Path

from standin_gpu.build import BuildError, build

#: One statement that `site` runs at start: packages of the base environment, with their .pth files.
BASE_PATH_FILE = "base_environment.pth"


def make_environment(out: Path, base: Path, torch_version: str) -> Path:
    """The new environment's Python. `base` is an environment of the same Python with everything but torch's CUDA build.

    Raises BuildError, in one sentence, where there is no compiler or the wheel can't be had.
    """
    for program in ("gcc", "g++", "nm"):
        if not shutil.which(program):
            raise BuildError(f"no {program}: apt-get install g++ binutils")
    _run([str(base / "bin" / "python"), "-m", "venv", "--without-pip", str(out)], "no venv could be made")
    python, pip = out / "bin" / "python", [str(base / "bin" / "python"), "-m", "pip", "--python", str(out / "bin" / "python")]
    # `===` leaves out builds with a local version, as 2.13.0+cpu
    _run([*pip, "install", "-q", "--no-deps", f"torch==={torch_version}"], f"no wheel of torch {torch_version} with CUDA")
    triton, cuda = required_versions(_site(out) / f"torch-{torch_version}.dist-info" / "METADATA")
    _run([*pip, "install", "-q", "--no-deps", triton], f"no wheel of {triton}")
    headers = out / "cuda_headers"
    # Apart from the environment: torch looks for libcudart beside itself before it asks the loader.
    packages = [f"nvidia-cuda-runtime=={cuda}.*", f"nvidia-cuda-crt=={cuda}.*"]
    command = [*pip, "install", "-q", "--no-deps", "--upgrade", "--target", str(headers), *packages]
    _run(command, f"no headers of CUDA {cuda}")
    include = next(headers.glob("nvidia/*/include/cuda_runtime_api.h")).parent
    build([_site(out), _site(base)], libraries_of(out), include)
    (_site(out) / BASE_PATH_FILE).write_text(
        f"import site; site.addsitedir({str(_site(base).resolve())!r})\n", encoding="utf-8"
    )
    return python


def libraries_of(environment: Path) -> Path:
    """Folder of the stand-in libraries in an environment that `make_environment` made."""
    return environment / "standin_libraries"


def required_versions(metadata: Path) -> tuple[str, str]:
    """(requirement of triton, major.minor of CUDA) of a torch wheel."""
    text = metadata.read_text(encoding="utf-8")
    triton = re.search(r"Requires-Dist: (triton[=~]=[\d.]+)", text)
    cuda = re.search(r"Requires-Dist: cuda-toolkit\[[^]]*\]==(\d+\.\d+)", text)
    if not triton or not cuda:
        raise BuildError(f"{metadata} names no versions of triton and CUDA's toolkit")
    return triton[1], cuda[1]


def _site(environment: Path) -> Path:
    return next((environment / "lib").glob("python3*/site-packages"))


def _run(command: list[str], problem: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = next((line for line in result.stderr.splitlines() if line.startswith("ERROR")), result.stderr.strip()[-200:])
        raise BuildError(f"{problem}: {reason}")
