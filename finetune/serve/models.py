"""One base model in memory with the adapters of several runs, each by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import CommandError
from finetune.evaluate.answerer import Answerer, adapter_folder
from finetune.model.generate import Sampling, Streamed
from finetune.plan.plan import read_plan
from finetune.run.directory import require_data

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory

BASE = "base"
#: What may differ between runs whose adapters share one base model in memory.
_OF_THE_BASE = ("model_revision", "load_in_4bit", "load_in_8bit", "dtype")


def named(runs: list[RunDirectory]) -> dict[str, RunDirectory]:
    """Each run by the name of its folder. Raises CommandError for equal names and for runs of different base models."""
    found: dict[str, RunDirectory] = {}
    for run in runs:
        name = run.path.resolve().name
        if name in found or name == BASE:
            raise CommandError(f"two models would be called {name}", f"Rename one: finetune runs rename {run.path} NEW")
        found[name] = run
    first, *others = runs
    for run in others:
        if (one := _base_of(first)) != (other := _base_of(run)):
            differing = next(key for key in one if one[key] != other[key])
            raise CommandError(
                f"{run.path} has another base model than {first.path}: {differing} {other[differing]}, not {one[differing]}",
                "Serve them one by one, on two ports.",
            )
    return found


def _base_of(run: RunDirectory) -> dict[str, Any]:
    from finetune.model.weights import weights_fingerprint

    settings = read_plan(run.plan).settings
    values = {name: getattr(settings, name) for name in _OF_THE_BASE}
    return {"model": settings.model_name_or_path, **values, "weights": weights_fingerprint(settings)}


class Models:
    """The loaded models: `base` and each run's, with that run's tokenizer and chat template.

    One at a time answers: switching adapters changes the model for everybody.
    """

    def __init__(self, runs: dict[str, RunDirectory]) -> None:
        (first, run), *others = runs.items()
        answerer = Answerer(run)
        self.model = answerer.model
        self._adapters: dict[str, str | None] = {BASE: None, first: "default"}
        self._prompts = {BASE: answerer, first: answerer}
        for number, (name, other) in enumerate(others, start=1):
            folder = adapter_folder(other)
            assert folder is not None
            require_data(other)
            self._prompts[name] = _Sharing(other, self._load(folder, f"adapter{number}"))
            self._adapters[name] = f"adapter{number}"

    @property
    def names(self) -> list[str]:
        """`base` and the runs."""
        return list(self._adapters)

    def prompt_ids(self, name: str, messages: list[dict[str, Any]]) -> list[int]:
        """Tokens of a conversation with the chat template of that run's training. Raises DataError where it refuses them."""
        return self._prompts[name].prompt_ids(messages)

    def stream(
        self, name: str, question: list[int], *, most_tokens: int, sampling: Sampling, say: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> Streamed:  # fmt: skip
        """The answer of that model to a tokenised prompt."""
        with self._as(name):
            return self._prompts[name].stream(question, max_new_tokens=most_tokens, sampling=sampling, say=say, stopped=stopped)

    @contextlib.contextmanager
    def _as(self, name: str) -> Iterator[None]:
        adapter = self._adapters[name]
        if adapter is None:
            with self._prompts[name].as_base():
                yield
            return
        self.model.set_adapter(adapter)
        yield

    def _load(self, folder: Path, adapter: str) -> Any:
        try:
            self.model.load_adapter(str(folder), adapter_name=adapter, use_safetensors=True)
        except (KeyError, ValueError, TypeError, OSError, RuntimeError) as error:
            raise CommandError(
                f"the adapter in {folder} can't be loaded beside the others: {type(error).__name__}: {error}",
                "Serve it alone.",
            ) from None
        return self.model.eval()


class _Sharing(Answerer):
    """Another run's prompts and answers, with a model that is loaded already."""

    def __init__(self, run: RunDirectory, model: Any) -> None:
        self._shared = model
        super().__init__(run)

    def load(self, adapter: Path | None) -> Any:
        return self._shared
