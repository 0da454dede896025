"""Errors, tables and status lines for a terminal."""

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

from finetune.errors import DataError, FinetuneError
from finetune.units import Progress, format_bytes, format_count, format_seconds, printable

if TYPE_CHECKING:  # an error of a recipe is printed without events
    from finetune.events import Step
    from finetune.memory.forecast import Forecast
    from finetune.planner.plan import Plan, Verdict


class SafeConsole(Console):
    """A console that escapes control characters."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # text must not act on the terminal, only the console's own styles
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


out = SafeConsole(highlight=False)
err = SafeConsole(stderr=True, highlight=False)
_MOST_ROWS = 15
_STATE_COLOURS = {
    "finished": "green", "running": "cyan", "starting": "cyan", "pausing": "yellow", "paused": "yellow",
    "failed": "red", "diverged": "red", "lost": "red",
}  # fmt: skip
_VERDICT_COLOURS = {"ok": "green", "warn": "yellow"}
_REPEAT_S = 10.0  # seconds between two lines of the same task's progress in a file


def print_error(error: FinetuneError) -> None:
    """Print the problems and the fix."""
    err.print(f"[bold red]{escape(error.title)}[/]")
    # every row of the data may have a problem
    limit = _MOST_ROWS if isinstance(error, DataError) else len(error.problems)
    for problem in error.problems[:limit]:
        err.print(f"  {escape(problem)}")
    if len(error.problems) > limit:
        err.print(f"  ... and {len(error.problems) - limit} more")
    if error.fix:
        err.print(f"[bold]Fix:[/] {escape(error.fix)}")


def print_text(text: str) -> None:
    """Print a file's text, escaped on a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end="")  # a pipe gets the text unchanged


@contextmanager
def show_progress(quiet: bool) -> Iterator[Progress]:
    """Yield a callback that shows progress messages on stderr."""
    if quiet:
        yield lambda _: None
    elif err.is_terminal:
        with err.status("") as status:
            yield lambda message: status.update(f"[dim]{escape(message)} ...[/]")
    else:
        printed_s: dict[str, float] = {}

        # a log file gets one line per task and ten seconds: `reading: 10 rows`, `reading: 20 rows` are the same task
        def report(message: str) -> None:
            task, now_s = message.partition(":")[0], time.monotonic()
            if now_s - printed_s.get(task, -_REPEAT_S) >= _REPEAT_S:
                printed_s[task] = now_s
                err.print(f"[dim]{escape(message)} ...[/]", soft_wrap=True)

        yield report


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table; columns that start with `>` are right-aligned."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        # numbers and, except on a narrow terminal, the names in the first column are not wrapped
        no_wrap = justify == "right" or (index == 0 and out.width >= 80)
        result.add_column(column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=no_wrap)
    return result


def step_line(step: Step, left_s: float | None) -> str:
    """Return a step as a line of at most 80 columns."""
    loss = "-" if step.loss is None else f"{step.loss:.4f}"
    rate = format_count(round(step.tokens_per_s)) if step.tokens_per_s else "-"
    memory = f"process {format_bytes(step.process_rss_bytes)} / {format_bytes(step.process_peak_rss_bytes)}"
    if step.peak_allocated_bytes is not None:  # None on a CPU
        memory = f"GPU {format_bytes(step.allocated_bytes)} / {format_bytes(step.peak_allocated_bytes)}"
    left = "-" if left_s is None else format_seconds(left_s)
    return f"step {step.step}/{step.total_steps or '?'}  loss {loss}  {rate} tok/s  {memory}  left {left}"


def state_text(state: str, style: str = "") -> Text:
    """Return a coloured state."""
    return Text(state, f"{style} {_STATE_COLOURS.get(state, '')}")


def print_summary(plan: Plan) -> None:
    """Print a plan in short."""
    card, forecast = plan.card, plan.forecast
    template, values = plan.verdict_sentence()
    model = escape(str(plan.settings.model_name_or_path))
    out.print(f"[bold]{model}[/] on {escape(card.name)}, {format_bytes(card.free_bytes)} free")
    out.print(f"[bold]{coloured(plan.verdict, template.format(**values))}[/]")
    if card.problem:
        out.print(escape(f"no run can use this GPU now: {card.problem}. Fix: {card.problem_fix}"))
    if not forecast:
        return
    sizes = (forecast.peak_bytes, forecast.peak_high_bytes, plan.usable_bytes)
    likely, high, usable = map(format_bytes, sizes)
    out.print(coloured(plan.verdict, _bar(*sizes)))
    out.print(f"{likely} at the peak, at most {high}, of {usable} it may use\n{_largest_parts(plan, forecast)}")
    if plan.verdict.level != "bad":
        out.print(_time_text(plan, forecast))
    for note in forecast.notes:
        out.print(escape(note))


def _bar(likely_bytes: int, high_bytes: int, usable_bytes: int) -> str:
    # likely peak, interval above, and free memory, to scale; `|` marks usable memory that is too small
    cells, full_bytes = min(out.width, 79), max(high_bytes, usable_bytes)
    likely, high, end = (round(cells * size / full_bytes) for size in (likely_bytes, high_bytes, usable_bytes))
    bar = "█" * likely + "▒" * (high - likely) + "·" * (cells - high)
    return bar if end == cells else f"{bar[:end]}|{bar[end + 1 :]}"


def _largest_parts(plan: Plan, forecast: Forecast) -> str:
    overhead = "process" if plan.card.is_cpu else "CUDA overhead"
    sizes = {**forecast.parts, overhead: forecast.peak_bytes - forecast.allocated_bytes}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    sizes["other"] = forecast.peak_bytes - sum(sizes[name] for name in largest)
    return ", ".join(f"{name} {format_bytes(sizes[name])}" for name in [*largest, "other"])


def _time_text(plan: Plan, forecast: Forecast) -> str:
    steps, tokens, rate = plan.total_steps, plan.settings.max_length, forecast.tokens_per_s
    if rate and forecast.step_s:
        seconds = forecast.step_s * steps if steps else 1000 * tokens / rate
        work = f"{steps:,} steps" if steps else f"1,000 rows of {tokens:,} tokens"
        time = f"about {format_seconds(seconds)} for {work} ({rate:,.0f} tokens/s)"
    else:
        time = "not known before the first run on this machine"
    cost = "" if plan.cost is None else f"; it costs {plan.cost:,.2f} at {plan.settings.price_per_hour:g} an hour"
    return f"Time: {time}{cost}"


def coloured(verdict: Verdict, text: str) -> str:
    """Return `text` in the verdict's colour."""
    return f"[{_VERDICT_COLOURS.get(verdict.level, 'red')}]{text}[/]"
