"""Rail beside every page: pages, running job, GPU memory."""

from __future__ import annotations

import contextlib

from finetune.card.visible import usable_devices
from finetune.errors import FinetuneError
from finetune.run.state import is_alive

from ..views.markup import render
from ..web.followed import FollowedPage


class Rail(FollowedPage):
    """Running job and GPU memory."""

    name, part_names, every_ms = "rail", ("now",), 3000

    def parts(self) -> dict[str, str]:
        run, live = next((run for run in self.context.workspace.list_runs() if is_alive(run)), None), None
        with contextlib.suppress(FinetuneError, OSError, ValueError):  # a damaged run
            if run is not None:
                self.context.lives.of(run).refresh()
                live = self.context.lives.of(run)
        return {"now": render("rail_status", live=live, gpus=usable_devices())}
