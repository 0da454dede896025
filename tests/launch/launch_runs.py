"""Readers of a run's events and files for tests."""

from pathlib import Path

from finetune.events import State, Step, read_events

#: A sitecustomize.py that makes process 1 run out of memory in step 3, as long as its micro-batch is 2.
OUT_OF_MEMORY_ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
    import torch
    from finetune.run.training import RunTrainer
    real = RunTrainer.training_step
    def training_step(self, model, inputs, *rest):
        if self.state.global_step == 2 and len(inputs["input_ids"]) == 2:
            torch.empty(2**60)
        return real(self, model, inputs, *rest)
    RunTrainer.training_step = training_step
"""


def steps(run) -> list[Step]:
    """The `step` events of a run, the last attempt's where a step was done twice."""
    latest = {event.step: event for event in read_events(run.events) if isinstance(event, Step)}
    return [latest[number] for number in sorted(latest)]


def adapter(run) -> dict:
    """The finished adapter's weights."""
    from safetensors.torch import load_file

    return load_file(Path(run.adapter) / "adapter_model.safetensors")


def events_of(run, kind):
    return [event for event in read_events(run.events) if isinstance(event, kind)]


def last_state(run):
    return events_of(run, State)[-1]
