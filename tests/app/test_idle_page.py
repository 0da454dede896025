"""A page that is open takes no memory with time, and shows what has changed."""

import asyncio
import shutil
import time

import pytest

from finetune.events import EventWriter, Step
from finetune.run.directory import RunDirectory

pytestmark = pytest.mark.slow  # the page plans its recipe


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One page for all tests: it starts two processes, which import torch."""
    from app.context import Context
    from app.page import build_page
    from app.workspace import Workspace

    folder = tmp_path_factory.mktemp("served")
    context = Context(Workspace(folder, folder / "runs"), folder / "temporary")
    yield build_page(context)[0], folder / "runs"
    context.close()


@pytest.fixture
def page(served):
    return served[0]


@pytest.fixture
def runs(served):
    yield served[1]
    for run in served[1].glob("[!.]*"):
        shutil.rmtree(run)


class Tab:
    """Does what the browser does: sends the values of inputs, keeps those of outputs, and fires `change` when one differs."""

    def __init__(self, page):
        from gradio.state_holder import SessionState

        self.page, self.session = page, SessionState(page)
        self.values = {number: getattr(component, "value", None) for number, component in page.blocks.items()}
        self.named = {component.elem_id: number for number, component in page.blocks.items() if component.elem_id}
        self.fired = 0

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
        self.fired += 1
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


def test_idle_ticks_leave_no_component_behind_and_show_nothing_anew(page):
    tab, ticks = Tab(page), len(Tab(page).events("tick"))
    n_quiet = 0
    for _ in range(300):  # what starts with the page may end late, and between two quiet ticks
        fired = tab.fired
        tab.tick()
        n_quiet = n_quiet + 1 if tab.fired - fired == ticks else 0
        if n_quiet == 10:
            break
        time.sleep(0.2)
    components, fired = tab.components, tab.fired
    tab.tick(5)
    assert tab.components == components
    assert tab.fired - fired == 5 * ticks


def test_a_page_follows_a_run_and_keeps_no_component_of_each_step(page, runs, kept_run):
    run = RunDirectory(kept_run(runs))
    tab = Tab(page)
    writer, components = EventWriter(run.events), []
    for step in range(1001, 1005):
        writer.emit(Step(step=step, total_steps=2000, loss=1.0))
        tab.tick(2)
        assert f"{step:,} of " in tab["runs-list"]
        components.append(tab.components)
    writer.close()
    assert components[1] == components[3]


def test_a_new_run_is_listed_and_one_that_is_gone_is_not(page, runs, kept_run):
    first = kept_run(runs)
    tab = Tab(page)
    tab.tick()
    shutil.copytree(first, first.with_name("second"))
    tab.tick()
    assert all(f"{name}</a>" in tab[listed] for name in ("finished", "second") for listed in ("runs-list", "home-recent"))
    shutil.rmtree(first)
    tab.tick()
    assert "second</a>" in tab["runs-list"] and "finished</a>" not in tab["runs-list"]
