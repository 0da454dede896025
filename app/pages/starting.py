"""Progress of a start that was asked for on a page: in the queue, being prepared, started or failed."""

from __future__ import annotations

from urllib.parse import quote

from ..background.queue import Queue
from ..language import mark, tr
from ..views.markup import inert
from ..views.problems import problem

#: The queue's states as they are shown.
_STATES = {"waiting": mark("In the queue"), "preparing": mark("Starting")}


def progress_of(queue: Queue, mine: str) -> str:
    """The newest start that is open, or that of the entry `mine`; the page goes to the run when it has started."""
    entries = [entry for entry in queue.entries() if entry.path.name == mine or entry.status()["state"] in _STATES]
    if not entries:
        return ""
    status = entries[-1].status()
    if status["state"] == "failed":
        return problem(status["message"], status.get("problems") or [], status.get("fix") or "")
    if status["state"] == "started":
        link, name = f"/run?run={quote(status['run'])}", inert(status["run"])
        watch = f'<a href="{link}" data-go="{link}">{tr("Watch {run}", run=name)}</a>'
        return f'<p class="ft-note ok" role="status">{tr("Started.")} {watch}</p>'
    message = f"{inert(tr(_STATES.get(status['state'], status['state'])))}: {inert(tr(status['message']))}"
    return f'<p class="ft-note" role="status"><span class="ft-busy"></span> {message}</p>'
