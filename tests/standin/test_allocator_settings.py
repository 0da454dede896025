"""A run says when the segments of torch's allocator can't expand, though its forecast counts on it."""

import pytest

from finetune.events import RunWarning, read_events

pytestmark = [pytest.mark.standin, pytest.mark.slow]


def test_a_run_whose_segments_can_not_expand_says_what_it_may_take(standin, tmp_path):
    machine, run = standin("rtx-4090"), tmp_path / "run"
    arguments = ["tiny-cpu", "gpu=auto", "max_steps=1", "dataset.max_rows=16", f"output_dir={run}", "sample_answers=0"]
    machine.run("finetune", "run", *arguments, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    messages = [event.message for event in read_events(run / "events.jsonl") if isinstance(event, RunWarning)]
    assert any("ignores expandable_segments" in message for message in messages)
