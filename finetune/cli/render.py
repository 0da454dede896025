"""Terminal output: errors, tables, status lines. Formatting only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from finetune.errors import DataError
from finetune.printable import Progress, printable
from finetune.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:  # an error of a recipe is printed without events
    from finetune.errors import FinetuneError
    from finetune.events import Memory, Step


class SafeConsole(Console):
    """A console that shows control and bidirectional characters of whatever it prints escaped: only its own styles act."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments whose text can't act on the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


out = SafeConsole(highlight=False)
err = SafeConsole(stderr=True, highlight=False)
_MOST_ROWS = 15
_STATE_COLOURS = {
    "finished": "green", "running": "cyan", "starting": "cyan", "stopping": "yellow", "stopped": "yellow", "paused": "yellow",
    "failed": "red", "diverged": "red", "lost": "red",
}  # fmt: skip
#: Seconds between two lines of the same count.
_REPEAT_S = 10.0


def print_error(error: FinetuneError) -> None:
    """Print the problems and the fix: all problems of a recipe, the first ones of the data."""
    err.print(f"[bold red]{escape(error.title)}[/]")
    most = _MOST_ROWS if isinstance(error, DataError) else len(error.problems)
    for problem in error.problems[:most]:
        err.print(f"  {escape(problem)}")
    if len(error.problems) > most:
        err.print(f"  ... and {len(error.problems) - most} more")
    if error.fix:
        err.print(f"[bold]Fix:[/] {escape(error.fix)}")


def print_text(text: str) -> None:
    """Print a file's text: as it is into a file or a pipe, escaped on a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end="")


def print_versions() -> None:
    """Print the versions of finetune and its packages."""
    from finetune import __version__
    from finetune.requirements import installed_version

    out.print(f"finetune {__version__}")
    for name in ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "gradio"):
        out.print(f"  {name} {installed_version(name) or 'is missing'}")


@contextmanager
def show_progress(quiet: bool) -> Iterator[Progress]:
    """Yields a callback that shows a message: one changing line on a terminal, nothing when `quiet`, else a line each, a count
    every ten seconds. An empty message takes the line away, until the next one."""
    if quiet:
        yield lambda _: None
    elif err.is_terminal:
        with err.status("") as status:

            def change(message: str) -> None:
                if message:
                    status.update(f"[dim]{escape(message)} ...[/]")
                    status.start()
                else:
                    status.stop()

            yield change
    else:
        printed_s: dict[str, float] = {}

        def report(message: str) -> None:
            kind, now_s = message.partition(":")[0], time.monotonic()
            if message and now_s - printed_s.get(kind, -_REPEAT_S) >= _REPEAT_S:
                printed_s[kind] = now_s
                err.print(f"[dim]{escape(message)} ...[/]")

        yield report


def table(*columns: str, title: str | None = None) -> Table:
    """A table in the project's one style; columns that start with '>' are right-aligned."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):  # names stay whole, long text wraps
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        whole = justify == "right" or (index == 0 and out.width >= 80)  # a narrow terminal wraps names, too
        result.add_column(column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=whole)
    return result


def step_line(step: Step, left_s: float | None) -> str:
    """One step as a plain line of at most 80 columns."""
    shown = "-" if step.loss is None else f"{step.loss:.4f}"
    rate = format_count(round(step.tokens_per_s)) if step.tokens_per_s else "-"
    return (
        f"step {step.step}/{step.total_steps or '?'}  loss {shown}  {rate} tok/s  {memory_now(step)}  "
        f"left {'-' if left_s is None else format_seconds(left_s)}"
    )


def memory_now(memory: Memory) -> str:
    """Memory now and at the peak, on the card; or of the process on a CPU, and then it says so."""
    if memory.peak_allocated_bytes is not None:
        return f"card {format_bytes(memory.allocated_bytes)} / {format_bytes(memory.peak_allocated_bytes)}"
    return f"process {format_bytes(memory.process_rss_bytes)} / {format_bytes(memory.process_peak_rss_bytes)}"


def state_text(state: str, style: str = "") -> Text:
    """Return a run's state in its colour."""
    return Text(state, f"{style} {_STATE_COLOURS.get(state, '')}")
