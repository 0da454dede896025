"""A page that is open takes no memory with time, and shows what has changed."""

import asyncio

import pytest

from app.context import Context
from app.page import build_page
from app.workspace import Workspace
from finetune.events import EventWriter, Step
from finetune.run.directory import RunDirectory

pytestmark = pytest.mark.slow  # the page plans its recipe


class Tab:
    """Does what the browser does: sends the values of inputs, keeps those of outputs, and fires `change` when one differs."""

    def __init__(self, page):
        from gradio.state_holder import SessionState

        self.page, self.session = page, SessionState(page)
        self.values = {number: getattr(component, "value", None) for number, component in page.blocks.items()}
        self.named = {component.elem_id: number for number, component in page.blocks.items() if component.elem_id}

    def events(self, kind, source=None):
        return [event for event in self.page.fns.values()
                if any(name == kind and source in (None, number) for number, name in event.targets)]  # fmt: skip

    def tick(self, count=1):
        async def ticks():
            for _ in range(count):
                for event in self.events("tick"):
                    await self._fire(event)

        asyncio.run(ticks())

    async def _fire(self, event):
        sent = [None if component.stateful else self.values[component._id] for component in event.inputs]
        answer = await self.page.process_api(event, sent, state=self.session)
        for component, value in zip(event.outputs, answer["data"], strict=True):
            if isinstance(value, dict) and value.get("__type__") == "update":
                value = value.get("value", self.values[component._id])
            if not component.stateful and value != self.values[component._id]:
                self.values[component._id] = value
                for follows in self.events("change", component._id):
                    await self._fire(follows)

    def __getitem__(self, elem_id):
        return self.values[self.named[elem_id]]

    @property
    def components(self):
        return set(self.session.blocks_config.blocks)


def test_a_page_follows_a_run_and_keeps_no_component_of_each_step(tmp_path, kept_run):
    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")
    run, tab = RunDirectory(kept_run(tmp_path / "runs")), Tab(build_page(context)[0])
    writer, components = EventWriter(run.events), []
    for step in range(1001, 1005):
        writer.emit(Step(step=step, total_steps=2000, loss=1.0))
        tab.tick(2)
        assert f"{step:,} of " in tab["runs-list"]
        components.append(tab.components)
    writer.close()
    context.close()
    assert components[1] == components[3]
