"""`finetune report` and `finetune compare`: runs as one HTML file, written by the page's own process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out
from finetune.cli.ui import page_command
from finetune.errors import CommandError, FinetuneError
from finetune.run.directory import open_run


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
