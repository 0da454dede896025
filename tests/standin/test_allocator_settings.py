"""A run says when torch's allocator does not use the settings that its forecast counts on."""

import pytest

from finetune.events import RunWarning, read_events

pytestmark = [pytest.mark.standin]

ASK = """
import sys, torch
from finetune.card.allocator import AllocatorSettings
from finetune.card.cuda import ignored_settings
torch.zeros(10, device="cuda")
print(*ignored_settings(AllocatorSettings(**eval(sys.argv[1]))))
"""
SETTINGS = {
    "expandable_segments:True": {"expandable_segments": True},
    "roundup_power2_divisions:4,max_split_size_mb:200,garbage_collection_threshold:0.8": {
        "roundup_power2_divisions": 4, "max_split_size_mb": 200, "garbage_collection_threshold": 0.8,
    },
}  # fmt: skip


@pytest.mark.parametrize("variable", SETTINGS)
def test_settings_of_the_variable_are_in_use_and_without_it_named(standin, variable):
    machine, planned = standin("rtx-4090"), SETTINGS[variable]
    in_use = machine.python(ASK, repr(planned), environment={"PYTORCH_ALLOC_CONF": variable})
    unset = machine.python(ASK, repr(planned))
    assert (in_use.stdout.split(), unset.stdout.split()) == ([], list(planned))


@pytest.mark.slow
def test_a_run_whose_segments_can_not_expand_says_what_it_may_take(standin, tmp_path):
    machine, run = standin("rtx-4090"), tmp_path / "run"
    arguments = ["tiny-cpu", "gpu=auto", "max_steps=1", "dataset.max_rows=16", f"output_dir={run}", "sample_answers=0"]
    machine.run("finetune", "run", *arguments, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    messages = [event.message for event in read_events(run / "events.jsonl") if isinstance(event, RunWarning)]
    assert [message for message in messages if "does not use expandable_segments" in message]
