"""One base model in memory with the adapters of several runs, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import CommandError
from finetune.evaluate.answerer import Answerer, adapter_folder
from finetune.model.generate import Sampling, Streamed
from finetune.planner.plan import read_plan
from finetune.run.directory import require_data
from finetune.settings.base_formats import SWITCHES

if TYPE_CHECKING:
    from finetune.data.answer_reader import AnswerReader
    from finetune.data.pictures.source import PictureSource
    from finetune.run.directory import RunDirectory

BASE = "base"
#: Settings that must be equal for adapters to share one base model in memory.
_BASE_SETTINGS = ("model_revision", *SWITCHES, "dtype", "vision", "new_tokens", "trained_embedding_rows")


def runs_by_name(runs: list[RunDirectory]) -> dict[str, RunDirectory]:
    """The runs by the names of their folders. Raises CommandError for equal names and for different base models."""
    by_name: dict[str, RunDirectory] = {}
    for run in runs:
        name = run.path.resolve().name
        if name in by_name or name == BASE:
            raise CommandError(f"two models would be called {name}", f"Rename one: finetune runs rename {run.path} NEW")
        by_name[name] = run
    first, *others = runs
    for run in others:
        if (expected := _base_key(first)) != (actual := _base_key(run)):
            differing = next(key for key in expected if expected[key] != actual[key])
            raise CommandError(
                f"{run.path} has another base model than {first.path}: "
                f"{differing} {actual[differing]}, not {expected[differing]}",
                "Serve them one by one, on two ports.",
            )
    return by_name


def _base_key(run: RunDirectory) -> dict[str, Any]:
    from finetune.model.weights import weights_fingerprint

    settings = read_plan(run.plan).settings
    values = {name: getattr(settings, name) for name in _BASE_SETTINGS}
    return {"model": settings.model_name_or_path, **values, "weights": weights_fingerprint(settings)}


class Models:
    """The loaded models: `base` and each run's, with that run's tokenizer and chat template.

    Only one can answer at a time: switching adapters changes the shared model.
    """

    def __init__(self, runs: dict[str, RunDirectory]) -> None:
        (first, run), *other_runs = runs.items()
        answerer = Answerer(run)
        self.model = answerer.model
        self._adapters: dict[str, str | None] = {BASE: None, first: "default"}
        self._answerers = {BASE: answerer, first: answerer}
        for number, (name, other_run) in enumerate(other_runs, start=1):
            folder = adapter_folder(other_run)
            assert folder is not None
            require_data(other_run)
            self._answerers[name] = _SharedModelAnswerer(other_run, self._load_adapter(folder, f"adapter{number}"))
            self._adapters[name] = f"adapter{number}"

    @property
    def names(self) -> list[str]:
        """`base` and the runs."""
        return list(self._adapters)

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

    def stream(
        self, name: str, question: list[int], *, max_new_tokens: int, sampling: Sampling, say: Callable[[str], None],
        stopped: Callable[[], bool], with_calls: bool = False, constraint: Any = None, pictures: Sequence[PictureSource] = (),
    ) -> Streamed:  # fmt: skip
        """The answer of that model to a tokenised prompt with its pictures."""
        with self._using(name):
            return self._answerers[name].stream(
                question, max_new_tokens=max_new_tokens, sampling=sampling, say=say, stopped=stopped, with_calls=with_calls,
                constraint=constraint, pictures=pictures,
            )  # fmt: skip

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[None]:
        adapter = self._adapters[name]
        if adapter is None:
            with self._answerers[name].as_base():
                yield
            return
        self.model.set_adapter(adapter)
        yield

    def _load_adapter(self, folder: Path, adapter: str) -> Any:
        try:
            self.model.load_adapter(str(folder), adapter_name=adapter, use_safetensors=True)
        except (KeyError, ValueError, TypeError, OSError, RuntimeError) as error:
            raise CommandError(
                f"the adapter in {folder} can't be loaded beside the others: {type(error).__name__}: {error}",
                "Serve it alone.",
            ) from None
        return self.model.eval()


class _SharedModelAnswerer(Answerer):
    """Another run's prompts and answers, with the shared model."""

    def __init__(self, run: RunDirectory, model: Any) -> None:
        self._shared = model
        super().__init__(run)

    def load(self, adapter: Path | None) -> Any:
        return self._shared
