"""`finetune ui`, `report` and `compare`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out
from finetune.errors import CommandError, FinetuneError
from finetune.events import read_events
from finetune.run.directory import RunDirectory, open_run
from finetune.run.memory import outcome
from finetune.run.state import compare_held_out
from finetune.system import exec_command


def page_command(module: str = "") -> list[str]:
    """Return the page's command, or a submodule's, such as `.report`."""
    package = "finetune.app" if find_spec("finetune.app") else "app"  # in a checkout, app/ is beside finetune/ (setup.py)
    return [sys.executable, "-P", "-m", f"{package}{module}"]  # -P: never a folder named app in the working directory


def start_page(*, host: str, port: int, runs: str, allow_host: list[str]) -> int:
    """Replace this process by the page's server."""
    host_options = [part for name in allow_host for part in ("--allow-host", name)]
    return exec_command([*page_command(), "--host", host, "--port", str(port), "--runs", runs, *host_options])


def report_run(source: str, *, output: str | None, as_json: bool) -> None:
    """Write the report of a run."""
    run = open_run(source)
    _write_page([run], Path(output) if output else run.path / "report.html", outcome(read_events(run.events))[0], as_json)


def compare_runs(sources: list[str], *, output: str | None, as_json: bool) -> None:
    """Write the comparison of several runs."""
    names = dict.fromkeys(sources)
    if len(names) < 2:
        raise CommandError("compare needs two runs or more", "For one run: finetune report RUN")
    if len(names) > 10:
        raise CommandError(f"{len(names)} runs are too many for one page", "Give at most 10.")
    runs = [open_run(name) for name in names]
    template, values = compare_held_out(runs)
    _write_page(runs, Path(output or "comparison.html"), template.format(**values), as_json)


def _write_page(runs: list[RunDirectory], target: Path, summary: str, as_json: bool) -> None:
    # in another process: no module of finetune imports the app
    command = [*page_command(".report"), str(target), *(str(run.path) for run in runs)]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        raise FinetuneError.from_output(process.stderr) or RuntimeError(last_line or "the report's process ended")
    if as_json:
        print_json({"report": str(target), "runs": [str(run.path) for run in runs]})
    else:
        out.print(escape(summary))
        out.print(f"report in {escape(str(target))}", soft_wrap=True)
