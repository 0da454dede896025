"""Build the stand-in libraries, make an environment that has them, or run a command on a machine with stand-in GPUs."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from standin_gpu.build import BuildError, build
from standin_gpu.environment import make_environment
from standin_gpu.machine import describe, machine_environment, read_catalogue

CATALOGUE = Path(__file__).parent.parent / "finetune" / "card" / "cards.json"


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    commands = argparse.ArgumentParser(prog="standin_gpu", description=__doc__)
    subparsers = commands.add_subparsers(dest="command", required=True)
    building = subparsers.add_parser("build", help="write the libraries for a Python environment")
    building.add_argument("--site", type=Path, action="append", required=True, help="site-packages with torch's CUDA build")
    building.add_argument("--out", type=Path, required=True, help="folder for the libraries")
    building.add_argument("--include", type=Path, default=Path("/usr/local/cuda/include"), help="folder of cuda_runtime_api.h")
    making = subparsers.add_parser("environment", help="make an environment with torch's CUDA build and the libraries")
    making.add_argument("--base", type=Path, required=True, help="an environment with all other packages and pip")
    making.add_argument("--out", type=Path, required=True, help="folder of the new environment")
    making.add_argument("--torch", required=True, help="version of torch, e.g. 2.13.0")
    running = subparsers.add_parser("run", help="run a command on a stand-in machine")
    running.add_argument("--libraries", type=Path, default=os.environ.get("STAND_IN_LIBRARIES"), help="folder from `build`")
    running.add_argument(
        "--gpu", action="append", help="a GPU of the catalogue, e.g. rtx-4090:total_gib=20, or name=..., total_gib=..."
    )
    running.add_argument(
        "--catalogue", type=Path, default=CATALOGUE if CATALOGUE.is_file() else None, help="GPUs by name (cards.json)"
    )
    running.add_argument("--machine", type=Path, help="description of a machine, instead of --gpu")
    running.add_argument("--trace", type=Path, help="file for counts of kernels, copies and synchronisations; .PID is appended")
    running.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return commands


def run(options: argparse.Namespace) -> int:
    """Exit status of the command on its machine."""
    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command or not options.libraries:
        print("standin_gpu run needs --libraries FOLDER and -- COMMAND", file=sys.stderr)
        return 2
    gpus = options.gpu or ["name=NVIDIA GeForce RTX 4090, total_gib=23.55"]
    description = (
        options.machine.read_text(encoding="utf-8") if options.machine else describe(gpus, read_catalogue(options.catalogue))
    )
    with tempfile.TemporaryDirectory(prefix="standin_gpu_") as folder:
        environment = {**os.environ, **machine_environment(Path(options.libraries), Path(folder), description)}
        if options.trace:
            environment["STAND_IN_TRACE"] = str(options.trace.resolve())
        status = subprocess.run(command, env=environment).returncode
    return status if status >= 0 else 128 - status


def main() -> int:
    """Exit status: 0, the command's own, 2 for wrong options, 3 where something is missing."""
    options = parser().parse_args()
    try:
        if options.command == "run":
            return run(options)
        if options.command == "environment":
            print(make_environment(options.out, options.base, options.torch))
            return 0
        print("built:", " ".join(build(options.site, options.out, options.include)))
        return 0
    except (BuildError, ValueError) as error:
        print(f"standin_gpu: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
