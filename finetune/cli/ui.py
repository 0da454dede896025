"""`finetune ui`, `report` and `compare`: the web page's process, which also writes runs as one HTML file."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out
from finetune.errors import CommandError, FinetuneError
from finetune.requirements import refuse_missing_extra
from finetune.run.directory import open_run
from finetune.system import exec_command


def page_command(module: str = "") -> list[str]:
    """The command line of the page, or of its `module`, such as ".report".

    An installed page is `finetune.app`; a checkout's is `app`, a folder of its own (setup.py). `-P`: a folder named app in the
    working directory is neither.
    """
    package = "finetune.app" if find_spec("finetune.app") else "app"
    return [sys.executable, "-P", "-m", f"{package}{module}"]


def start_page(*, host: str, port: int, runs: str, allow_host: list[str]) -> int:
    """Become the page's process."""
    refuse_missing_extra("ui", "the page")
    command = [*page_command(), "--host", host, "--port", str(port), "--runs", runs]
    for name in allow_host:
        command += ["--allow-host", name]
    return exec_command(command)


def write_report(sources: list[str], *, output: str | None, as_json: bool) -> int:
    """Write the report of one run, or the comparison of several; returns the exit code."""
    runs = [open_run(source) for source in dict.fromkeys(sources)]
    if len(runs) > 10:
        raise CommandError(f"{len(runs)} runs are too many for one page", "Give at most 10.")
    target = Path(output) if output else runs[0].path / "report.html" if len(runs) == 1 else Path("comparison.html")
    command = [*page_command(".report"), str(target), *(str(run.path) for run in runs)]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        raise FinetuneError.written_by(process.stderr) or RuntimeError(last_line or "the report's process ended")
    if as_json:
        print_json({"report": str(target), "runs": [str(run.path) for run in runs]})
    else:
        out.print(f"report in {escape(str(target))}", soft_wrap=True)
    return 0
