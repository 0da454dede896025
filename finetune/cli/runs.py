"""`finetune runs`: the runs under runs/ with their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.cli.app import print_json
from finetune.cli.render import out, state_text, table
from finetune.run.directory import list_runs
from finetune.run.state import read_state

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory


def show_runs(*, as_json: bool) -> None:
    """Print the runs, newest first."""
    rows = [_row(run) for run in list_runs()]
    if as_json:
        print_json(rows)
        return
    if not rows:
        out.print("No runs yet. Start one: finetune run tiny-cpu")
        return
    shown = table("run", "state", ">step", ">loss")
    for row in rows:
        step = f"{row['step'] or 0}/{row['total_steps'] or '?'}"
        shown.add_row(row["path"], state_text(row["state"]), step, "-" if row["loss"] is None else f"{row['loss']:.4f}")
    out.print(shown)


def _row(run: RunDirectory) -> dict[str, Any]:
    state = read_state(run)
    return {
        "path": str(run.path), "state": state.state, "message": state.message, "step": state.step,
        "total_steps": state.total_steps, "loss": state.loss,
    }  # fmt: skip
