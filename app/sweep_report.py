"""A sweep as one HTML file with its arms' curves over each other: `python -m app.sweep_report SWEEP FILE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from finetune.files import write_output
from finetune.sweep.sweep import ArmResult, Sweep, label, open_sweep

from .report import STYLE
from .views.charts import Line, Mark, Panel, chart
from .views.markup import inert, note, table


def main() -> int:
    """Write the file; returns the exit code."""
    write_output(Path(sys.argv[2]), page(open_sweep(Path(sys.argv[1]))))
    return 0


def page(sweep: Sweep) -> str:
    """The whole page."""
    results, title = sweep.results(), inert(sweep.path.name)
    style = (Path(__file__).parent / "theme.css").read_text(encoding="utf-8") + STYLE
    body = f"<section><h2>Held-out loss</h2>{_curves(sweep, results)}</section><section><h2>Arms</h2>{_arms(results)}</section>"
    created = time.strftime("%Y-%m-%d %H:%M")
    rule = note(f"Compared after {', '.join(f'{rung:,}' for rung in sweep.facts.rungs[:-1])} steps: {sweep.facts.rule}.")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f'<body class="gradio-container"><h1 class="ft-title">{title}</h1><p>{inert(sweep.sentence())}</p>{rule}{body}'
        f"{note(f'Made {created} by finetune.')}</body></html>\n"
    )


def _curves(sweep: Sweep, results: list[ArmResult]) -> str:
    lines = [
        Line(label(entry.values), [(float(step), loss) for step, loss in entry.curve], f"run run{number}")
        for number, entry in enumerate(results)
    ]
    marks = [Mark(f"compared after {rung:,} steps", float(rung), "") for rung in sweep.facts.rungs[:-1]]
    panel = Panel("Held-out loss of every arm", lines, lambda value: f"{value:.3g}")
    return chart([panel], marks, float(sweep.facts.rungs[-1]), f"Held-out loss by step. {sweep.sentence()}")


def _arms(results: list[ArmResult]) -> str:
    rows = []
    for entry in results:
        gap = entry.behind
        behind = "" if gap is None else f"{gap.value:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"
        state = entry.state if entry.dropped_at is None else f"dropped at {entry.dropped_at:,}"
        loss = "not measured" if entry.loss is None else f"{entry.loss:.4f}"
        rows.append([label(entry.values), state, f"{entry.step or 0:,}", loss, behind, entry.run])
    columns = ["arm", "state", ">steps", ">held-out loss", "behind the best (95 % interval)", "run"]
    return table(columns, rows, "Arms", hidden_caption=True)


if __name__ == "__main__":
    sys.exit(main())
