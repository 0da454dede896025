"""Describe a machine with stand-in GPUs, and the environment in which a program is on it."""

import json
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Shown by nvidia-smi beyond what CUDA sees, in MiB.
RESERVED_MIB = 400
#: struct machine_usage of src/usage.h.
USAGE_BYTES = 64 + 256 * (8 + 16 * 8)
DEFAULTS = {
    "name": "Stand-in GPU",
    "total_gib": 24,
    "capability": "8.9",
    "context_gib": 0.35,
    "cores": 16384,
    "clock_mhz": 2520,
}


def parse_gpu(text: str, catalogue: Mapping[str, Mapping]) -> dict:
    """Facts of one GPU: `rtx-4090` of the catalogue, `rtx-4090:total_gib=20`, or `name=..., total_gib=..., capability=...`.

    Raises ValueError for a name that the catalogue lacks.
    """
    name, _, changes = text.partition(":")
    if "=" in name:
        name, changes = "", text
    facts: dict = dict(DEFAULTS)
    if name:
        if name not in catalogue:
            raise ValueError(f"no GPU {name!r} in the catalogue; choose one of {', '.join(catalogue) or 'none'}")
        entry = catalogue[name]
        facts |= {key: entry[key] for key in ("total_gib", "context_gib", "multiprocessors") if key in entry}
        facts |= {"name": entry["device"], "capability": ".".join(map(str, entry["capability"]))}
    for change in filter(None, (part.strip() for part in changes.split(","))):
        key, _, value = change.partition("=")
        facts[key.strip()] = value.strip()
    return facts


def describe_gpu(facts: Mapping, number: int) -> list[str]:
    """Lines of a machine's description (src/nvml.c) for one GPU."""
    total_mib = float(facts["total_gib"]) * 1024
    lines = [
        f"card = {facts['name']}",
        f"uuid = GPU-5ca1ab1e-0000-4000-8000-{number:012x}",
        f"pci = 00000000:{number + 1:02X}:00.0",
        f"capability = {facts['capability']}",
        f"total_mib = {round(total_mib) + RESERVED_MIB}",
        f"reserved_mib = {RESERVED_MIB}",
        f"used_mib = {round(float(facts.get('used_gib', 0)) * 1024)}",
        f"cores = {facts['cores']}",
        f"clock_mhz = {facts['clock_mhz']}",
        "pcie = 4 x 16",
        f"context_mib = {round(float(facts['context_gib']) * 1024)}",
    ]
    if "multiprocessors" in facts:
        lines.append(f"multiprocessors = {facts['multiprocessors']}")
    return lines


def describe(gpus: Sequence[str], catalogue: Mapping[str, Mapping], driver: str = "580.95.05", cuda: int = 13000) -> str:
    """Description of a machine with these GPUs (texts of `parse_gpu`)."""
    lines = [f"driver = {driver}", f"cuda = {cuda}"]
    for number, text in enumerate(gpus):
        lines += describe_gpu(parse_gpu(text, catalogue), number)
    return "\n".join([*lines, ""])


def read_catalogue(path: Path | None) -> dict:
    """GPUs by name from a file like finetune/card/cards.json; none without a file."""
    return json.loads(path.read_text(encoding="utf-8"))["cards"] if path else {}


def machine_environment(libraries: Path, folder: Path, description: str) -> dict[str, str]:
    """Return the variables that put a program on the described machine; its processes share `folder`.

    Programs with the same folder are on the same machine and see each other's memory.
    """
    machine, usage = folder / "machine", folder / "usage"
    machine.write_text(description, encoding="utf-8")
    if not usage.exists():
        usage.write_bytes(bytes(USAGE_BYTES))
    searched = [str(libraries.resolve()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        "STAND_IN_MACHINE": str(machine), "STAND_IN_USAGE": str(usage), "LD_LIBRARY_PATH": os.pathsep.join(searched),
        "TRITON_LIBCUDA_PATH": str(libraries.resolve()),
    }  # fmt: skip


class Machine:
    """A machine in use: programs that are started here see its GPUs and each other's memory."""

    def __init__(self, libraries: Path, folder: Path, description: str):
        """The machine's programs share `folder`, which must exist."""
        self.folder = folder
        self.environment = {**os.environ, **machine_environment(libraries, folder, description)}

    def run(self, *command: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; returns its output as text. `check` raises RuntimeError with the output if it fails."""
        environment = {**self.environment, **options.pop("environment", {})}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")
        return result

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """The program, running; its standard output and error are pipes of text."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environment, text=True, **{**pipes, **options})

    def lose_gpu(self, number: int = 0) -> None:
        """The GPU falls off the bus: CUDA's calls end in a launch failure, NVML's in "GPU is lost"."""
        with (self.folder / "usage").open("r+b") as file:
            file.seek(4 * number)
            file.write((1).to_bytes(4, "little"))

    def used_bytes(self, number: int = 0) -> dict[int, int]:
        """Bytes of a GPU by the process that holds them, its context included."""
        data = (self.folder / "usage").read_bytes()
        processes = (struct.unpack_from("<i4x16Q", data, start) for start in range(64, USAGE_BYTES, 8 + 16 * 8))
        return {pid: used[number] for pid, *used in processes if pid and used[number]}
