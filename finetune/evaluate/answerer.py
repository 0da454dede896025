"""Generate with a finished run's model, base or tuned. One model in memory: the adapter is switched on and off."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from finetune.data import Encoder
from finetune.data.tokenizer import run_tokenizer
from finetune.errors import CommandError
from finetune.files import sha256_of
from finetune.model.generate import Sampling, Streamed, greedy_answers, streamed_answer
from finetune.model.put_away import load_base
from finetune.model.quiet import quiet_libraries
from finetune.model.transformers_config import load_config
from finetune.model.weights import weights_fingerprint
from finetune.plan.plan import read_plan
from finetune.run.directory import require_data, require_intact_adapter
from finetune.run.seal import newest_verified

if TYPE_CHECKING:
    from finetune.plan.plan import Plan
    from finetune.run.directory import RunDirectory


class Answerer:
    """The base model of a run with its adapter, or with the `last` step's beside the best.

    `others`: folders of more adapters of the same base, by the names with which `using` chooses them. `adapter`: name of the
    adapter's folder. `plain`: the run was trained on prompts as they are, without the chat template.
    """

    def __init__(
        self, run: RunDirectory, *, need_adapter: bool = True, last: bool = False, others: Mapping[str, Path] | None = None
    ) -> None:
        quiet_libraries()
        folder = adapter_folder(run, last=last, needed=need_adapter)
        self._read(run, read_plan(run.plan), folder)
        self.device = "cpu" if self.plan.card.is_cpu else "cuda"
        self.model = self.load(folder)
        self._tuned = folder is not None
        self._key = "default"
        self._keys = {name: self._added(path) for name, path in (others or {}).items()}

    def _added(self, folder: Path) -> str:
        """Load one more adapter beside those that are there; returns PEFT's name for it."""
        key = f"adapter{len(self.model.peft_config)}"
        with _explained(folder):
            self.model.load_adapter(str(folder), key, use_safetensors=True)
        return key

    def beside(self, other: RunDirectory) -> Answerer:
        """Another run's answerer that shares this one's base model. Raises CommandError when it was trained on another."""
        plan, folder = read_plan(other.plan), adapter_folder(other)
        if _base_of(plan) != _base_of(self.plan):
            raise CommandError(
                f"{other.path.name} was trained on another base model than {self.run.path.name}, or on another form of it",
                "Chat with each of them alone.",
            )
        assert folder is not None
        made = copy.copy(self)
        made.answer_for(other, plan, folder, self._added(folder))
        return made

    def answer_for(self, run: RunDirectory, plan: Plan, folder: Path, key: str) -> None:
        """From now on answer as `run`, whose adapter is loaded under PEFT's name `key`."""
        self._read(run, plan, folder)
        self._key, self._keys = key, {}

    def _read(self, run: RunDirectory, plan: Plan, folder: Path | None) -> None:
        """The run's own tokenizer and template."""
        require_data(run)
        self.run, self.plan, self.adapter = run, plan, folder.name if folder else None
        self.tokenizer: PreTrainedTokenizerBase = run_tokenizer(run.data / "tokenizer", plan.settings)
        self.encoder = Encoder(self.tokenizer, conversations=self.tokenizer.chat_template is not None)
        self.plain = is_plain(run)

    def load(self, adapter: Path | None) -> Any:
        """The model in evaluation mode."""
        return _load(self.plan, adapter, self.device)

    @contextlib.contextmanager
    def as_base(self) -> Iterator[None]:
        """Disable the adapter inside the block."""
        if not self._tuned:
            yield
            return
        with self.model.disable_adapter():
            yield

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Inside the block: `base` is the model without an adapter, a name of `others` has that one; else the run's own."""
        if name == "base":
            with self.as_base():
                yield
            return
        if isinstance(self.model, PeftModel):
            self.model.set_adapter(self._keys.get(name, self._key))
        yield

    def answer(self, questions: list[list[int]], *, max_new_tokens: int, streamer: Any = None) -> list[str]:
        """Greedy answers to tokenised prompts, as one batch, without special tokens."""
        return greedy_answers(
            self.model, self.tokenizer, questions,
            stops=self.encoder.stops, max_new_tokens=max_new_tokens, streamer=streamer,
        )  # fmt: skip

    def stream(
        self, question: list[int], *, max_new_tokens: int, sampling: Sampling, say: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> Streamed:  # fmt: skip
        """The answer to a tokenised prompt, with each piece of its text passed to `say`, until `stopped()`."""
        return streamed_answer(
            self.model, self.tokenizer, question,
            stops=self.encoder.stops, max_new_tokens=max_new_tokens, sampling=sampling, say=say, stopped=stopped,
        )  # fmt: skip

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Tokens of a conversation as prompts were in training: with the chat template, or the last message as plain text."""
        return self.encoder.prompt_ids(messages[-1]["content"] if self.plain else messages)


def is_plain(run: RunDirectory) -> bool:
    """Whether a run was trained on prompts without the chat template, by its data report; earlier versions wrote none."""
    try:
        found = json.loads((run.data / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and bool(found.get("plain"))


def adapter_folder(run: RunDirectory, *, last: bool = False, needed: bool = True) -> Path | None:
    """The result's folder, else the newest sealed checkpoint; with `last` the last step's adapter beside the best.

    Raises RecipeError when there is none and one is `needed`, or when it has changed.
    """
    if last:
        return _last_adapter(run)
    if run.adapter.is_dir():
        require_intact_adapter(run.adapter)
        return run.adapter
    checkpoint, _ = newest_verified(run.checkpoints)
    if checkpoint is not None:
        return checkpoint.path
    if needed:
        raise CommandError(
            f"{run.path} has no adapter and no sealed checkpoint yet", f"Let it train further: finetune resume {run.path}"
        )
    return None


def _last_adapter(run: RunDirectory) -> Path:
    if not run.last_adapter.is_dir():
        raise CommandError(f"{run.path} has no {run.last_adapter.name}: its result is the last step", "Leave out --last.")
    require_intact_adapter(run.last_adapter)
    return run.last_adapter


def _base_of(plan: Plan) -> tuple[Any, ...]:
    """What two adapters must have in common to share a loaded model."""
    settings = plan.settings
    weights = weights_fingerprint(settings) or (settings.model_name_or_path, settings.model_revision)
    return weights, settings.load_in_4bit, settings.load_in_8bit, settings.dtype


def answer_facts(run: RunDirectory, plan: Plan, adapter: Path | None) -> dict[str, Any]:
    """What decides an answer beside its prompt: settings, base weights, adapter, versions. JSON values."""
    from importlib.metadata import version

    from finetune import __version__

    files = [] if adapter is None else sorted(adapter.glob("adapter_*"))
    return {
        "settings": plan.settings.model_dump(mode="json"), "base": weights_fingerprint(plan.settings),
        "adapter": {path.name: sha256_of(path) for path in files}, "card": plan.card.name,
        "versions": [__version__, *(version(name) for name in ("torch", "transformers", "peft"))],
    }  # fmt: skip


def longest(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> int:
    """Tokens of the longest text."""
    return max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def _load(plan: Plan, folder: Any, device: str) -> Any:
    settings = plan.settings
    base = load_base(settings, load_config(settings), "cpu" if device == "cpu" else 0, say=lambda _: None)
    with _explained(folder):
        model = PeftModel.from_pretrained(base, str(folder), use_safetensors=True) if folder else base
    if folder and (broken := [name for name, values in model.named_parameters() if _is_adapter_not_finite(name, values)]):
        raise CommandError(
            f"the adapter in {folder} has values that are not finite: {', '.join(broken[:3])}",
            "Its training diverged, or the file is damaged: train again with a lower learning_rate.",
        )
    return model.eval()


@contextlib.contextmanager
def _explained(folder: Any) -> Iterator[None]:
    """Turn errors of PEFT about an adapter that can't be loaded into a CommandError."""
    try:
        yield
    except (SafetensorError, KeyError, ValueError, TypeError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "mismatch" not in str(error):
            raise  # out of memory, among others
        raise CommandError(
            f"the adapter in {folder} can't be loaded: {type(error).__name__}: {error}",
            f"Delete or rename {folder} to use the newest sealed checkpoint, or train again.",
        ) from None


def _is_adapter_not_finite(name: str, values: torch.Tensor) -> bool:
    return ".lora_" in name and not bool(torch.isfinite(values).all())
