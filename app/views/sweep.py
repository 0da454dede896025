"""A sweep as HTML: its line on Runs, and its page: the result in words, its arms' curves over each other, and their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import quote

from finetune.sweep.sweep import ArmResult, Sweep, label

from ..browser_files import chart_element, has_charts
from .charts import Line, Mark, Panel, chart
from .markup import Safe, inert, note, table
from .run_row import link_to

#: Curves over each other that can still be told apart.
MOST_CURVES = 5


def listed(sweeps: Sequence[Sweep]) -> str:
    """The sweeps, newest first; nothing where there are none."""
    lines = "".join(
        f"<li><span><b>{_state(sweep)}</b> {link_to(sweep.path.name)} {len(sweep.facts.arms)} arms: {inert(sweep.sentence())}"
        "</span></li>"
        for sweep in sweeps
    )
    return f'<section class="ft-box ft-lines"><h2>Sweeps</h2><ul>{lines}</ul></section>' if lines else ""


def head(sweep: Sweep) -> str:
    """Its name; the rule; and how it goes on."""
    name, rungs = inert(sweep.path.name), ", ".join(f"{rung:,}" for rung in sweep.facts.rungs[:-1])
    return (
        f'<h1 class="ft-title" data-title="{name}">{name}</h1>'
        f"{note(f'A sweep. Compared after {rungs} steps: {sweep.facts.rule}.')}"
        f"{'' if sweep.is_finished else note(f'It is followed, and goes on, with: finetune sweep {sweep.path}')}"
    )


def curves(sweep: Sweep) -> str:
    """The arms' curves in one chart that follows them, or as a picture; of more than five those with the lowest losses."""
    names = [entry.name for entry in sweep.results()]
    chosen = [arm.name for arm in sweep.facts.arms if arm.name in names[:MOST_CURVES]]
    fewer = note(f"The {MOST_CURVES} arms with the lowest held-out losses as this page was opened.")
    shown = f"{fewer if len(names) > MOST_CURVES else ''}{chart_element(chosen)}" if has_charts() else picture(sweep)
    return f'<section class="ft-box"><h2>Arms</h2>{shown}</section>'


def arms(sweep: Sweep) -> str:
    """The result in words, and each arm with a link to its page."""
    linked = arms_table(sweep.results(), lambda entry: f'<a href="/run?run={quote(entry.name)}">{inert(entry.name)}</a>')
    return f'<section class="ft-box"><p role="status"><b>{_state(sweep)}.</b> {inert(sweep.sentence())}</p>{linked}</section>'


def picture(sweep: Sweep) -> str:
    """The held-out losses of every arm as SVG."""
    lines = [
        Line(label(entry.values), [(float(step), loss) for step, loss in entry.curve], f"run run{number}")
        for number, entry in enumerate(sweep.results())
    ]
    marks = [Mark(f"compared after {rung:,} steps", float(rung), "") for rung in sweep.facts.rungs[:-1]]
    panel = Panel("Held-out loss of every arm", lines, lambda value: f"{value:.3g}")
    return chart([panel], marks, float(sweep.facts.rungs[-1]), f"Held-out loss by step. {sweep.sentence()}")


def arms_table(results: Sequence[ArmResult], run: Callable[[ArmResult], str]) -> str:
    """Values, state, loss and distance to the best of every arm; `run`: HTML that names its run."""
    rows = []
    for entry in results:
        gap = entry.behind
        behind = "" if gap is None else f"{gap.value:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"
        state = entry.state if entry.dropped_at is None else f"dropped at {entry.dropped_at:,}"
        loss = "not measured" if entry.loss is None else f"{entry.loss:.4f}"
        rows.append([label(entry.values), state, f"{entry.step or 0:,}", loss, behind, Safe(run(entry))])
    columns = ["arm", "state", ">steps", ">held-out loss", "behind the best (95 % interval)", "run"]
    return table(columns, rows, "Arms", hidden_caption=True)


def _state(sweep: Sweep) -> str:
    return "Running" if sweep.is_running else "Finished" if sweep.is_finished else "Stopped"
