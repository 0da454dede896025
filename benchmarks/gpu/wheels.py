"""Wheels for a machine that has torch but no package index: `python -m benchmarks.gpu.wheels --python 3.12 --cuda 130`.

Downloads the versions of constraints.txt for this Python and CUDA on x86-64 Linux into .whl/, which git ignores. bitsandbytes
keeps the library of this CUDA version only. Fails above 64 MiB.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from finetune.units import MIB, format_bytes

ROOT = Path(__file__).resolve().parents[2]
#: What a run imports beside torch, numpy, pandas, pyarrow, safetensors and tokenizers, which machines with torch tend to have.
PACKAGES = (
    "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "dill", "multiprocess", "pydantic",
    "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "nvidia-ml-py",
)  # fmt: skip
#: pip compares a wheel's glibc with these exactly.
GLIBC = ("2_17", "2_24", "2_27", "2_28", "2_31", "2_34")
MOST_BYTES = 64 * MIB


def main() -> int:
    """Download the wheels and print their sizes; returns 1 if they are too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="the other machine's version of Python")
    parser.add_argument("--cuda", default="130", help="CUDA version of its torch, without a dot: 130 for +cu130")
    parser.add_argument("--folder", type=Path, default=ROOT / ".whl")
    parser.add_argument("more", nargs="*", help="further packages to download")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for old in options.folder.glob("*.whl"):  # two versions of a package stop an installation
        old.unlink()
    platforms = [f"--platform=manylinux_{glibc}_x86_64" for glibc in GLIBC] + ["--platform=manylinux2014_x86_64"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp",
         f"--python-version={options.python}", *platforms, "--dest", str(options.folder), *pinned([*PACKAGES, *options.more])],
        check=True,
    )  # fmt: skip
    for wheel in options.folder.glob("bitsandbytes-*.whl"):
        prune(wheel, f"libbitsandbytes_cuda{options.cuda}.so")
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(options.folder.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{format_bytes(size):>10}  {name}")
    total = sum(sizes.values())
    print(f"{format_bytes(total):>10}  in {options.folder}; at most {format_bytes(MOST_BYTES)}")
    return int(total > MOST_BYTES)


def pinned(names: list[str]) -> list[str]:
    """`NAME==VERSION` of each package, from constraints.txt; others at their newest version."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    versions = {name.lower().replace("_", "-"): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.M)}
    return [f"{name}=={versions[name]}" if name in versions else name for name in names]


def prune(wheel: Path, library: str) -> None:
    """Rewrite bitsandbytes' wheel with one CUDA library. Raises SystemExit when it has no such library."""

    def stays(name: str) -> bool:
        return "/libbitsandbytes_" not in name or name.endswith((f"/{library}", "/libbitsandbytes_cpu.so"))

    pruned = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(pruned, "w", zipfile.ZIP_DEFLATED) as new:
        names = old.namelist()
        if not any(name.endswith(f"/{library}") for name in names):
            libraries = ", ".join(sorted(name.rpartition("/")[2] for name in names if "/libbitsandbytes_" in name))
            raise SystemExit(f"bitsandbytes has no {library}. Choose --cuda for one of {libraries}")
        for name in filter(stays, names):
            data = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if stays(line.partition(",")[0])).encode()
            new.writestr(old.getinfo(name), data, zipfile.ZIP_DEFLATED)
    pruned.replace(wheel)


if __name__ == "__main__":
    sys.exit(main())
