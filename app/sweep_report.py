"""A sweep as one HTML file with its arms' curves over each other: `python -m app.sweep_report SWEEP FILE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from finetune.files import write_output
from finetune.sweep.sweep import RULE, Sweep, open_sweep

from .report import STYLE
from .views import sweep as sweep_view
from .views.markup import as_on_page, inert, note


def main() -> int:
    """Write the file; returns the exit code."""
    write_output(Path(sys.argv[2]), page(open_sweep(Path(sys.argv[1]))))
    return 0


def page(sweep: Sweep) -> str:
    """The whole page."""
    title = inert(sweep.path.name)
    style = (
        "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("theme.css", "svg_chart.css")) + STYLE
    )
    arms = sweep_view.arms_table(sweep.results(), lambda entry: inert(entry.run))
    body = f"<section><h2>Held-out loss</h2>{sweep_view.losses(sweep)}</section><section><h2>Arms</h2>{arms}</section>"
    created = time.strftime("%Y-%m-%d %H:%M")
    rule = note(as_on_page(RULE))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f'<body class="gradio-container"><h1 class="ft-title">{title}</h1>'
        f"<p>{inert(sweep_view.sentence(sweep))}</p>{rule}{body}"
        f"{note(f'Made {created} by finetune.')}</body></html>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
