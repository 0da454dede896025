"""Rail beside every page: pages, running job, GPU memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from finetune import __version__
from finetune.card.visible import Device, usable_devices
from finetune.errors import FinetuneError
from finetune.run.state import is_alive

from ..language import LANGUAGES, current
from ..live import LiveRun
from ..views.markup import render
from ..web.followed import FollowedPage


class Rail(FollowedPage):
    """Running job and GPU memory."""

    name, part_names, every_ms = "rail", ("now",), 3000

    def parts(self) -> dict[str, str]:
        run = next((run for run in self.context.workspace.list_runs() if is_alive(run)), None)
        with contextlib.suppress(FinetuneError, OSError, ValueError):  # a damaged run
            if run is not None:
                live = self.context.lives.of(run)
                live.refresh()
                return {"now": status(live, usable_devices())}
        return {"now": status(None, usable_devices())}


def status(live: LiveRun | None, gpus: Sequence[Device]) -> str:
    """Return the running job and GPU memory."""
    return render("rail_status", live=live, gpus=gpus)


def rail(address: str) -> str:
    """Render the logo, the New run button and the page links. `address` is the open page."""
    return render("rail", address=address)


def foot() -> str:
    """Return theme, language and version."""
    return render("rail_foot", languages=LANGUAGES, current=current(), version=__version__)
