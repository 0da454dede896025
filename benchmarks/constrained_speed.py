"""Tokens per second of a model with and without a JSON schema: python benchmarks/constrained_speed.py [MODEL] [--rounds N].

Both answers have as many tokens; rounds alternate, and the median counts. The schema's own time is that of its masks.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.bundled import model_path
from finetune.model.constrained import Constraint
from finetune.model.generate import Sampling, streamed_answer

TOKENS = 120
#: An answer of at least TOKENS tokens with any vocabulary.
SCHEMA = {
    "type": "object", "required": ["rows"], "additionalProperties": False,
    "properties": {"rows": {"type": "array", "minItems": 200, "items": {
        "type": "object", "required": ["city", "days"], "additionalProperties": False,
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    }}},
}  # fmt: skip


class Timed(Constraint):
    """A constraint that counts the seconds of its masks."""

    seconds = 0.0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        masked = super().__call__(ids, scores)
        Timed.seconds += time.perf_counter() - began
        return masked


def tokens_per_s(model: object, tokenizer: object, schema: dict[str, object] | None) -> float:
    """Of one sampled answer of TOKENS tokens."""
    constraint = Timed(tokenizer, schema, {tokenizer.eos_token_id}) if schema else None
    prompt = tokenizer("Route this message: Hi, My invoice is wrong.")["input_ids"]
    answer = streamed_answer(
        model, tokenizer, prompt, stops={len(tokenizer) if schema is None else tokenizer.eos_token_id}, max_new_tokens=TOKENS,
        sampling=Sampling(1.0, 1.0, 3), constraint=constraint,
    )  # fmt: skip
    return answer.tokens_per_s or 0.0


def main() -> None:
    """Print both rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(model_path("tiny")))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    model.generation_config.eos_token_id = None
    rates: dict[str, list[float]] = {"free": [], "schema": []}
    tokens_per_s(model, tokenizer, SCHEMA)  # the tokenizer's table is made once
    Timed.seconds = 0.0
    for _ in range(arguments.rounds):
        rates["free"].append(tokens_per_s(model, tokenizer, None))
        rates["schema"].append(tokens_per_s(model, tokenizer, SCHEMA))
    free, constrained = (statistics.median(rates[name]) for name in ("free", "schema"))
    mask_s = Timed.seconds / (arguments.rounds * TOKENS)
    print(f"{free:.1f} tokens/s free, {constrained:.1f} with a schema, of which the masks cost {1e3 * mask_s:.2f} ms a token")


if __name__ == "__main__":
    main()
