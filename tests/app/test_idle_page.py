"""A page that is open and shows nothing new takes no memory."""

import asyncio

import gradio as gr
import pytest


@pytest.fixture
def page(tmp_path):
    from app.context import Context
    from app.page import build_page
    from app.workspace import Workspace

    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")
    yield build_page(context)[0]
    context.close()


def test_ticks_leave_no_component_behind(page):
    from gradio.state_holder import SessionState

    session = SessionState(page)
    ticking = [event for event in page.fns.values() if any(name == "tick" for _, name in event.targets)]
    timers = [event for event in ticking if not any(isinstance(shown, gr.Dropdown) for shown in event.outputs)]
    assert len(timers) == len(ticking) - 1 == 5  # Gradio keeps the list to choose from of each answer of the Runs page

    async def ticks(count):
        for _ in range(count):
            for event in timers:
                values = [None if component.stateful else component.value for component in event.inputs]
                await page.process_api(event, values, state=session)

    asyncio.run(ticks(2))
    known = set(session.blocks_config.blocks)
    asyncio.run(ticks(5))
    assert set(session.blocks_config.blocks) == known
