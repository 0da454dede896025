"""What keeps a run from starting, and its rows, as HTML."""

from __future__ import annotations

from finetune.errors import DataError
from finetune.planner.plan import Plan
from finetune.units import format_count

from ..language import tr
from ..planning.blocker import Blocker
from .markup import action, inert, note
from .problems import problem
from .words import rows


def blocker_note(blocker: Blocker) -> str:
    """Why a run would not start here, and the page with the fix where no button has it."""
    if blocker.elsewhere:
        return note(tr("Planned for another machine: {why}.", why=tr("; ").join(blocker.problems)))
    shown = problem(blocker.title, blocker.problems, "" if blocker.override else blocker.fix)
    if blocker.override:
        press = action(override=blocker.override)
        shown += f'<p id="fit-remedy"><button type="button" class="ft-small" {press}>{inert(blocker.label)}</button></p>'
    is_data = blocker.title == DataError.title and not blocker.override
    choose = f'<button type="button" class="ft-act" data-panel="data">{tr("Choose other data")}</button>'
    return shown + (f"<p>{choose}</p>" if is_data else "")


def data_note(plan: Plan) -> str:
    """Rows and tokens of the data; empty when they were not read."""
    if plan.data is None:
        return ""
    counts = {"rows": rows(plan.data.rows), "tokens": format_count(plan.data.total_tokens)}
    if not plan.data.longest:
        return note(tr("{rows}, {tokens} tokens.", **counts))
    return note(tr("{rows}, {tokens} tokens, the longest has {longest} tokens.", longest=f"{plan.data.longest:,}", **counts))
