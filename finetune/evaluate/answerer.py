"""Generate with a run's model; one model in memory, with its adapter enabled or disabled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from finetune import __version__
from finetune.card import cuda
from finetune.card.card import has_windows_driver
from finetune.compat.transformers import quiet_libraries
from finetune.data.chat_format import ChatFormat
from finetune.data.pictures.source import PictureSource
from finetune.data.tokens import Encoder
from finetune.data.tool_calls import Answer
from finetune.errors import CommandError
from finetune.evaluate.results import Journal
from finetune.evaluate.rows import run_encoder
from finetune.files import read_object, sha256_of
from finetune.model.adapters import TRAINED_ROWS, embedding_rows, grow_vocabulary
from finetune.model.build import build_base
from finetune.model.generate import MoreInputs, Sampling, Streamed, greedy_answers, streamed_answer
from finetune.model.transformers_config import load_config
from finetune.model.weights import configuration_fingerprint, generation_fingerprint, weights_fingerprint
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory, require_data
from finetune.run.seal import newest_verified, require_own_adapter, require_same_base
from finetune.settings import Settings
from finetune.units import Progress

_ORIGIN = "origin"  # adapter name under which the adapter that the run continued is loaded
OnPiece = Callable[[str, bool], None]  # takes a piece of an answer, and whether it is part of the thought


class Answerer:
    """The base model of a run with its adapter."""

    def __init__(self, run: RunDirectory, *, need_adapter: bool = True) -> None:
        quiet_libraries()
        require_data(run)
        folder = adapter_folder(run, required=need_adapter)
        self.run, self.plan = run, read_plan(run.plan)
        self.device = "cpu" if self.plan.card.is_cpu else "cuda"
        if self.device == "cuda" and has_windows_driver():
            # a batch too large must raise, and be halved: the Windows driver would spill it to host memory
            cuda.limit_reserved(cuda.free_bytes())
        self.encoder = run_encoder(run)
        self.tokenizer = self.encoder.tokenizer
        self.plain = is_plain(run)  # trained on prompts without the chat template
        self.chat_format = chat_format_of(run, self.encoder)  # the format of answers; None without a chat template
        self.model = load_model(self.plan.settings, folder, self.device, self.tokenizer)

    def require_vision(self) -> None:
        """Raise CommandError for a model that reads no images."""
        if not self.plan.settings.vision:
            problem = f"{self.run.path.name} was trained on text; its model is loaded without a vision tower"
            raise CommandError(problem, "Leave the images out.")

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Use no adapter for `base`, the adapter that the run continued for `origin`, else the run's adapter."""
        if not isinstance(self.model, PeftModel):
            yield
        elif name == "base":
            with self.model.disable_adapter():
                yield
        else:
            if name == _ORIGIN and _ORIGIN not in self.model.peft_config:
                with _adapter_errors(self.run.base_adapter):
                    self.model.load_adapter(str(self.run.base_adapter), _ORIGIN, use_safetensors=True)
            self.model.set_adapter(_ORIGIN if name == _ORIGIN else "default")  # PEFT's name of the run's adapter
            yield

    def answer(
        self, prompts: list[list[int]], *, max_new_tokens: int, with_special_tokens: bool,
        pictures: Sequence[Sequence[PictureSource]] = (),
    ) -> list[tuple[str, bool]]:  # fmt: skip
        """Return greedy answers to tokenised prompts, and whether the token limit cut each."""
        return greedy_answers(
            self.model, self.tokenizer, prompts, stops=self._stops(), max_new_tokens=max_new_tokens,
            with_special_tokens=with_special_tokens, more_inputs=self.more_inputs(pictures),
        )  # fmt: skip

    def more_inputs(self, pictures: Sequence[Sequence[PictureSource]]) -> MoreInputs | None:
        """Return a function for a batch's other inputs; None for a model of text."""
        return functools.partial(self.encoder.picture_processor.batch, rows=pictures) if self.plan.settings.vision else None

    def _stops(self) -> set[int]:
        return self.encoder.stops | (self.chat_format.call_stops if self.chat_format else set())

    def stream(
        self, turns: list[dict[str, Any]], on_piece: OnPiece, *, tools: tuple[dict[str, Any], ...] | None, max_new_tokens: int,
        sampling: Sampling, stopped: Callable[[], bool], pictures: Sequence[PictureSource] = (),
    ) -> tuple[Streamed, Answer]:  # fmt: skip
        """Answer `turns`, passing pieces to `on_piece` until `stopped()`; with `tools=None` calls stay text."""
        stream = AnswerStream(self.chat_format, tools, on_piece) if self.chat_format else None
        reply = streamed_answer(
            self.model, self.tokenizer, self.prompt_ids(turns, tools or (), pictures), stops=self._stops(),
            max_new_tokens=max_new_tokens, sampling=sampling, stopped=stopped, more_inputs=self.more_inputs([pictures]),
            on_text=stream.add if stream else lambda piece: on_piece(piece, False), with_special_tokens=stream is not None,
        )  # fmt: skip
        return reply, (stream.finish(is_cut=not reply.ended) if stream else Answer(reply.text))

    def prompt_ids(
        self, messages: list[dict[str, Any]], tools: tuple[dict[str, Any], ...] = (), pictures: Sequence[PictureSource] = ()
    ) -> list[int]:
        """Return the tokens of a conversation as prompts were in training."""
        if self.plain:
            return self.encoder.prompt_ids(messages[-1]["content"], ())
        return self.encoder.prompt_ids(messages, tools, pictures)


class AnswerStream:
    """Passes on thought and text, and delays the possible beginning of a mark or call."""

    def __init__(self, chat_format: ChatFormat, tools: Sequence[dict[str, Any]] | None, say: OnPiece) -> None:
        self._format, self._tools, self._say = chat_format, tools, say
        self._openings = chat_format.call_openings if tools is not None else ()
        self._received = ""
        self._said_text = self._said_thought = ""

    def add(self, piece: str) -> None:
        """Take the next piece, with its special tokens."""
        self._received += piece
        marks = (*self._openings, *self._format.literals)
        # the end that begins a mark is delayed, unless it completes one
        begun = (length for mark in marks for length in range(1, len(mark)) if self._received.endswith(mark[:length]))
        delayed = 0 if self._received.endswith(marks) else max(begun, default=0)
        complete = self._received[: len(self._received) - delayed]
        thought, text = self._format.split(complete.rstrip(), is_cut=True)
        text = text[: min((_call_start(text, opening) for opening in self._openings), default=None)]
        self._pass_on(self._format.without_special_tokens(text), self._format.without_special_tokens(thought))

    def finish(self, *, is_cut: bool = False) -> Answer:
        """Return the whole answer, after passing on delayed text that is no call."""
        answer = self._format.read(self._received, self._tools, is_cut=is_cut)
        text, said_text = answer.text, self._said_text.strip()
        if answer.calls and said_text and text.startswith(said_text) and text != said_text:  # text after the calls
            self._say(f"\n{text.removeprefix(said_text).strip()}", False)
        else:
            self._pass_on(text, answer.thought)
        return answer

    def _pass_on(self, text: str, thought: str) -> None:
        if thought.startswith(self._said_thought) and thought != self._said_thought:
            self._say(thought.removeprefix(self._said_thought), True)
            self._said_thought = thought
        if text.startswith(self._said_text) and text != self._said_text:
            self._say(text.removeprefix(self._said_text), False)
            self._said_text = text


def _call_start(text: str, opening: str) -> int:
    position = text.find(opening)
    # bare JSON is a call only at the beginning of the answer
    is_call = position >= 0 and not (opening == "{" and text[:position].strip())
    return position if is_call else len(text)


def is_plain(run: RunDirectory) -> bool:
    """Return whether a run was trained on prompts without the chat template."""
    return bool((read_object(run.data / "report.json") or {}).get("plain"))


def chat_format_of(run: RunDirectory, encoder: Encoder) -> ChatFormat | None:
    """Return the format of a run's answers; None without a chat template."""
    return None if is_plain(run) or encoder.template is None else encoder.chat_format


def adapter_folder(run: RunDirectory, *, required: bool = True) -> Path | None:
    """Return the adapter's folder, else the newest sealed checkpoint.

    Raise CommandError without an adapter if it is `required`, RecipeError for a changed adapter.
    """
    if run.adapter.is_dir():
        folder = run.adapter
    elif (checkpoint := newest_verified(run.checkpoints)[0]) is not None:
        folder = checkpoint.path
    elif required:
        fix = f"Continue its training: finetune resume {run.path}"
        raise CommandError(f"{run.path} has no adapter and no sealed checkpoint yet", fix)
    else:
        return None
    require_own_adapter(run, folder)
    return folder


def answerer_loader(run: RunDirectory, progress: Progress = lambda _: None) -> Callable[[], Answerer]:
    """Return a function that loads an answerer on its first call."""

    @functools.cache
    def load() -> Answerer:
        progress("loading base model and adapter")
        return Answerer(run)

    return load


def answer_journal(run: RunDirectory, name: str, adapter: Path | None) -> Journal:
    """Return a journal by everything that decides answers, except prompts."""
    plan = read_plan(run.plan)
    return Journal(run.path / "evaluations", name, {
        "settings": plan.settings.model_dump(mode="json"), "base": weights_fingerprint(plan.settings),
        "base_config": [configuration_fingerprint(plan.settings), generation_fingerprint(plan.settings)],
        "adapter": {path.name: sha256_of(path) for path in sorted(adapter.glob("adapter_*"))} if adapter else {},
        "card": plan.card.name,
        "versions": [__version__, *(version(library) for library in ("torch", "transformers", "peft"))],
    })  # fmt: skip


def answer_limit(
    tokenizer: PreTrainedTokenizerBase, references: list[str], least: int = 0, chat_format: ChatFormat | None = None
) -> int:
    """Return the most tokens of an answer: 16 more than the longest expected answer or `least`."""
    longest = max(least, *(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in references))
    thought_tokens = 1024 if chat_format and chat_format.opens_thought else 0  # a base model thinks before it answers
    return longest + 16 + thought_tokens


def load_model(settings: Settings, adapter: Path | None, device: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Any:
    """Load a base model in evaluation mode, with an adapter or without.

    Raise CommandError for an unusable adapter, RecipeError for an adapter of another base.
    """
    base = build_base(settings, load_config(settings), device="cpu" if device == "cpu" else 0, weights=True, offloads=True)
    grow_vocabulary(base, settings, tokenizer)  # the tokenizer gives the rows of new tokens their values
    if adapter:  # compared now, because `build_base` may have downloaded the base model
        require_same_base(adapter, settings)
    with _adapter_errors(adapter):
        model = PeftModel.from_pretrained(base, str(adapter), use_safetensors=True) if adapter else base
    trained = ((name, tensor) for name, tensor in model.named_parameters() if ".lora_" in name or TRAINED_ROWS in name)
    if non_finite := [name for name, tensor in trained if not torch.isfinite(tensor).all()]:
        raise CommandError(
            f"the adapter in {adapter} has values that are not finite: {', '.join(non_finite[:3])}",
            "Its training diverged, or the file is damaged: train again with a lower learning_rate.",
        )
    return model.eval()


@contextlib.contextmanager
def _adapter_errors(folder: Any) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError, ValueError, TypeError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "mismatch" not in str(error):  # of tensor shapes
            raise  # such as out of memory
        raise CommandError(
            f"the adapter in {folder} can't be loaded: {type(error).__name__}: {error}",
            f"Delete or rename {folder} to use the newest sealed checkpoint, or train again.",
        ) from None


#: Prompt and answer tokens of a batch, with padding. An 8B model's KV cache of 32,768 tokens takes 4 GiB.
#: On a CPU, more tokens than its caches hold are slower, and a small batch ends early.
ANSWER_TOKENS = {"cpu": 8_192, "cuda": 32_768}
_LOSS_TOKENS = 1_024  # of a batch whose loss is computed
_MAX_LOGITS = 64 * 2**20  # of such a batch: 256 MiB in float32


def loss_batch_tokens(model: Any) -> int:
    """Return the tokens of a batch whose loss is computed."""
    return min(_LOSS_TOKENS, _MAX_LOGITS // embedding_rows(model))


def batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Return batches of row indices, longest first, of at most `max_tokens` padded tokens."""
    row_batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # rows are padded to a batch's first row, which is its longest
        if row_batches and (len(row_batches[-1]) + 1) * lengths[row_batches[-1][0]] <= max_tokens:
            row_batches[-1].append(index)
        else:
            row_batches.append([index])  # even a row of more than `max_tokens`
    return row_batches


def run_halving(rows: list[int], work: Callable[[list[int]], None]) -> None:
    """Call `work(rows)`, and with half of the rows when GPU memory runs out. Raise the error of a single row."""
    try:
        work(rows)
    except torch.OutOfMemoryError:
        if len(rows) == 1:
            raise
        torch.cuda.empty_cache()
    else:
        return
    # not in `except`, where the error would keep the failed call's tensors alive
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        run_halving(half, work)
