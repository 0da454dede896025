"""Sample answers to held-out prompts at each evaluation, to show how answers change during training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.data.pictures.tensors import PictureTensors, source_of
from finetune.error_kinds import is_out_of_memory
from finetune.events import Sample
from finetune.files import read_json

if TYPE_CHECKING:
    from finetune.data.pictures.processing import PictureProcessor
    from finetune.events import EventWriter
    from finetune.planner.plan import Plan
    from finetune.run.directory import RunDirectory

#: Longer prompts are left out and answers end here: the KV cache of an 8B model stays below 300 MB.
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 64


class Samples:
    """The first short held-out prompts of a run, as many as its recipe's `sample_answers`."""

    def __init__(self, plan: Plan, run: RunDirectory, tokenizer: Any, processor: PictureProcessor | None = None) -> None:
        self._tokenizer, self._rows = tokenizer, []
        self._tensors = PictureTensors(processor) if processor else None
        settings, path = plan.settings, run.data / "eval_examples.json"
        if settings.launch.strategy != "ddp" or not path.is_file():  # one rank alone can't generate with sharded weights
            return
        rows = read_json(path)
        self._rows = [row for row in rows if len(row["prompt_ids"]) <= _PROMPT_TOKENS][: settings.sample_answers]

    def emit(self, model: Any, step: int, events: EventWriter) -> None:
        """Emit a `sample` event per prompt. `model` is in evaluation mode. Out of memory ends sampling, not the run."""
        if not self._rows:
            return
        from finetune.data.call_syntax import Answer
        from finetune.data.tokens import Encoder
        from finetune.model.generate import greedy_answers

        encoder = Encoder(self._tokenizer, conversations=self._tokenizer.chat_template is not None)
        questions = [row["prompt_ids"] for row in self._rows]
        try:
            more = None
            if self._tensors:
                sources = [[source_of(value) for value in row.get("pictures", ())] for row in self._rows]
                more = partial(self._tensors, rows=sources)
            answers = greedy_answers(
                model, self._tokenizer, questions, stops=encoder.stops, max_new_tokens=_ANSWER_TOKENS,
                with_special_tokens=encoder.template is not None, more_inputs=more,
            )  # fmt: skip
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._rows = []
            events.warn("no more sample answers: not enough memory to generate them")
            return
        for row, (text, is_cut) in zip(self._rows, answers, strict=True):
            read = encoder.template.format.read(text, None, is_cut=is_cut) if encoder.template else Answer(text)
            events.emit(Sample(
                step=step, prompt=row["prompt"], expected=row["answer"], answer=read.text or read.thought,
                pictures=tuple(picture["path"] for picture in row.get("pictures", ())),
            ))  # fmt: skip
