"""Greedy decoding of a batch of prompts with a loaded model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def greedy_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[list[int]],
    *,
    stops: Collection[int],
    max_new_tokens: int,
    streamer: Any = None,
) -> list[str]:
    """Continue tokenised prompts until one of `stops`, the model's EOS token or `max_new_tokens`; returns text.

    Prompts are padded on the left. The model should be in evaluation mode. No random numbers are drawn.
    """
    width = max(len(question) for question in questions)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stops)
    ids = torch.tensor([[padding] * (width - len(question)) + question for question in questions], device=model.device)
    mask = torch.tensor([[0] * (width - len(question)) + [1] * len(question) for question in questions], device=model.device)
    own = model.generation_config.eos_token_id
    known = own if isinstance(own, list) else [] if own is None else [own]
    made = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, temperature=None, top_p=None, top_k=None, use_cache=True,
        max_new_tokens=max_new_tokens, pad_token_id=padding, eos_token_id=sorted({*known, *stops}), streamer=streamer,
    )  # fmt: skip
    return tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
