"""One base model in memory with the adapters of several runs, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.data.answer_reader import AnswerReader
from finetune.data.pictures.source import PictureSource
from finetune.errors import CommandError
from finetune.evaluate.answerer import Answerer, require_shared_base
from finetune.model.generate import Streamed
from finetune.run.directory import RunDirectory

BASE = "base"


def runs_by_name(runs: list[RunDirectory]) -> dict[str, RunDirectory]:
    """The runs by the names of their folders. Raises CommandError for equal names and for different base models."""
    by_name: dict[str, RunDirectory] = {}
    for run in runs:
        name = run.path.resolve().name
        if name in by_name or name == BASE:
            raise CommandError(f"two models would be called {name}", f"Rename one: finetune runs rename {run.path} NEW")
        by_name[name] = run
    for run in runs[1:]:
        require_shared_base(run, runs[0])
    return by_name


class Models:
    """The loaded models: `base` and each run's, with that run's tokenizer and chat template.

    Only one can answer at a time: switching adapters changes the shared model.
    """

    def __init__(self, runs: dict[str, RunDirectory]) -> None:
        (first, run), *other_runs = runs.items()
        answerer = Answerer(run)
        self._answerers = {BASE: answerer, first: answerer}
        self._answerers |= {name: answerer.sharing_base(other_run) for name, other_run in other_runs}
        for answerer in self._answerers.values():  # memory was planned for no larger picture
            if answerer.plan.settings.vision and answerer.plan.data:
                answerer.encoder.picture_processor.limit(answerer.plan.data.largest_picture)

    @property
    def names(self) -> list[str]:
        """`base` and the runs."""
        return list(self._answerers)

    def prompt_ids(
        self, name: str, messages: list[dict[str, Any]], tools: tuple[dict[str, Any], ...] = (),
        pictures: Sequence[PictureSource] = (),
    ) -> list[int]:  # fmt: skip
        """Tokens of a conversation with that run's chat template. Raises DataError if the template refuses it."""
        return self._answerers[name].prompt_ids(messages, tools, pictures)

    def reads_pictures(self, name: str) -> bool:
        """Whether that model was loaded with its vision tower."""
        return self._answerers[name].plan.settings.vision is True

    def prompt_with_tools(
        self, name: str, messages: list[dict[str, Any]], tools: tuple[dict[str, Any], ...], force: str | None
    ) -> tuple[list[int], str]:
        """Tokens of a conversation with tools, and the beginning of the answer that they have.

        `force`: the answer begins with a call, of that tool; of any if empty. Raises DataError if the template refuses it.
        """
        answerer = self._answerers[name]
        if force is None:
            return answerer.prompt_ids(messages, tools), ""
        return answerer.encoder.call_prompt_ids(messages, tools, force or None)

    def constrained_prompt(self, name: str, messages: list[dict[str, Any]], schema: dict[str, Any]) -> tuple[list[int], Any]:
        """Tokens of a conversation, and the constraint of its answer. Raises DataError for what can't be used."""
        return self._answerers[name].constrained_prompt(messages, schema)

    def reader(self, name: str) -> AnswerReader | None:
        """Reads the answers of that model with their calls; None if its chat template writes none."""
        return self._answerers[name].reader

    def stream(self, name: str, question: list[int], **options: Any) -> Streamed:
        """The answer of that model to a tokenised prompt; `options`: those of `Answerer.stream`."""
        answerer = self._answerers[name]
        with answerer.using(name):
            return answerer.stream(question, **options)
