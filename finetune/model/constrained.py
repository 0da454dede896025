"""Answers in JSON or in a JSON schema: llguidance says which tokens may come next, all others get probability 0."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from finetune.errors import CommandError, DataError


class Constraint:
    """One answer's constraint, of transformers' LogitsProcessor: the answer matches `schema` if it ends before its limit.

    `stops` are the tokens that may end it. Raises DataError for a schema that can't be used, CommandError without llguidance.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schema: dict[str, Any], stops: Collection[int]) -> None:
        try:
            from llguidance import LLMatcher
        except ImportError:
            problem = "answers in JSON need llguidance, which is not installed"
            raise CommandError(problem, "Install it: pip install 'llguidance>=1.9,<2' (the extra 'json')") from None
        self._tokens = _token_trie(tokenizer, tuple(sorted(stops)))
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": r"[ \n]{0,2}"})
        if problem := LLMatcher.validate_grammar(grammar, self._tokens):
            raise DataError(f"the schema can't be used: {' '.join(str(problem).split())[:300]}", "Change the schema.")
        self._matcher = LLMatcher(self._tokens, grammar)
        self._length: int | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores with -inf for each token that can't come next, after the tokens of one sequence."""
        if self._length is not None:
            self._matcher.consume_tokens(ids[0, self._length :].tolist())
        self._length = ids.shape[1]
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            problem = f"the schema can't be followed further: {' '.join(self._matcher.get_error().split())[:300]}"
            raise DataError(problem, "Use a simpler schema.")
        allowed = np.zeros(scores.shape[-1], dtype=bool)  # the model may have more outputs than the tokenizer tokens
        bits = np.unpackbits(mask, bitorder="little")[: min(self._tokens.vocab_size, len(allowed))]
        allowed[: len(bits)] = bits
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), float("-inf"))


@lru_cache(maxsize=4)
def _token_trie(tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> Any:
    """The tokenizer's tokens as bytes, about a second for a large vocabulary. Raises DataError for a slow tokenizer."""
    from llguidance.hf import from_tokenizer

    fast_tokenizer: Any = tokenizer  # others raise ValueError
    try:
        return from_tokenizer(fast_tokenizer, eos_token=list(stops))
    except ValueError as error:
        raise DataError(f"this tokenizer can't be constrained: {error}", "Leave response_format out.") from None
