"""Answers of a loaded model: greedy for a batch, or sampled and streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList

from finetune.model.build import load_errors

#: Token ids of a batch -> the model's other inputs by name.
MoreInputs = Callable[[Tensor], dict[str, Any]]
_GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings."""

    #: 0 is greedy.
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Streamed:
    """A streamed answer."""

    text: str
    tokens: int
    seconds: float
    #: Whether `stopped()` ended the answer.
    stopped: bool
    #: Whether a stop token ended the answer.
    ended: bool = False

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second including the prompt's computation; None without tokens."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


@torch.no_grad()
def greedy_answers(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: list[list[int]], *, stops: Collection[int],
    max_new_tokens: int, with_special_tokens: bool, more_inputs: MoreInputs | None,
) -> list[tuple[str, bool]]:  # fmt: skip
    """Return the greedy continuation of each tokenised prompt, and whether `max_new_tokens` cut it."""
    # draws no random numbers, provided that the model is in evaluation mode
    answers, ends = [], _end_tokens(model, stops)
    for new in _generated_ids(model, tokenizer, questions, stops, more_inputs, max_new_tokens=max_new_tokens, **_GREEDY):
        length = next((index + 1 for index, token_id in enumerate(new) if token_id in ends), None)
        text = str(tokenizer.decode(new[:length], skip_special_tokens=not with_special_tokens))
        answers.append((text, length is None))
    return answers


@torch.no_grad()
def streamed_answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, question: list[int], *, stops: Collection[int], max_new_tokens: int,
    sampling: Sampling, on_text: Callable[[str], None], stopped: Callable[[], bool], with_special_tokens: bool,
    more_inputs: MoreInputs | None,
) -> Streamed:  # fmt: skip
    """Continue a tokenised prompt, passing each new piece of text to `on_text`, until `stopped()`."""
    pieces, began = _Pieces(tokenizer, on_text, with_special_tokens), time.perf_counter()
    was_stopped = False

    def is_stopped(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        nonlocal was_stopped
        was_stopped = was_stopped or stopped()
        return torch.full((len(ids),), was_stopped, device=ids.device)

    sampling_arguments = _GREEDY
    if sampling.temperature > 0:
        # transformers draws from torch's global generator
        torch.manual_seed(sampling.seed)
        sampling_arguments = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    streaming = {"streamer": pieces, "stopping_criteria": StoppingCriteriaList([is_stopped]), "max_new_tokens": max_new_tokens}
    (new,) = _generated_ids(model, tokenizer, [question], stops, more_inputs, **streaming, **sampling_arguments)
    text = pieces.finish(new)
    ended = bool(new) and new[-1] in _end_tokens(model, stops)
    return Streamed(text, len(new), time.perf_counter() - began, was_stopped and not ended, ended)


def _generated_ids(
    model: Any, tokenizer: Any, questions: list[list[int]], stops: Collection[int], more_inputs: Any, **arguments: Any
) -> list[list[int]]:
    # padded on the left, so that all prompts end together
    width = max(len(question) for question in questions)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stops)
    ids = torch.tensor([[pad_id] * (width - len(question)) + question for question in questions], device=model.device)
    mask = torch.tensor([[0] * (width - len(question)) + [1] * len(question) for question in questions], device=model.device)
    arguments |= {"pad_token_id": pad_id, "eos_token_id": _end_tokens(model, stops), **extra_model_inputs(ids, more_inputs)}
    with load_errors(model.config.name_or_path):
        return model.generate(input_ids=ids, attention_mask=mask, use_cache=True, **arguments)[:, width:].tolist()


def extra_model_inputs(ids: Tensor, more_inputs: MoreInputs | None) -> dict[str, Any]:
    """Return model inputs besides the token ids, such as pixel values, on the device of `ids`."""
    inputs = more_inputs(ids.cpu()) if more_inputs else {}
    return {name: value.to(ids.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _end_tokens(model: Any, stops: Collection[int]) -> list[int]:
    model_ids = model.generation_config.eos_token_id
    if not isinstance(model_ids, list):
        model_ids = [] if model_ids is None else [model_ids]
    return sorted({*model_ids, *stops})


class _Pieces:
    """A streamer for transformers that emits only text that later tokens can't change."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None], with_special: bool) -> None:
        self._tokenizer, self._on_text, self._with_special = tokenizer, on_text, with_special
        self._ids: list[int] = []
        self._emitted = ""

    def put(self, value: Tensor) -> None:
        if value.dim() == 2:  # the prompt
            return
        self._ids += value.reshape(-1).tolist()
        text = self._text(self._ids)
        if not text.endswith("\ufffd"):  # ends with an incomplete character
            self._emit(text)

    def end(self) -> None:
        """Part of transformers' interface."""

    def finish(self, ids: list[int]) -> str:
        """Emit the remaining text, and return the whole text."""
        text = self._text(ids)
        self._emit(text)
        return text if text.startswith(self._emitted) else self._emitted

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=not self._with_special))

    def _emit(self, text: str) -> None:
        # a token may change the decoded end of the emitted text: wait until the text begins with the emitted text again
        if text.startswith(self._emitted) and len(text) > len(self._emitted):
            self._on_text(text[len(self._emitted) :])
            self._emitted = text
