"""Names of models that the catalogue does not have and that look like others: what they are, and what can be done."""

from __future__ import annotations

import re

_CLOSED = "Open models that are trained here: `finetune recipes`, or a model of the hub by its id."
_BY_ID = "It is not in the offline catalogue; with the hub its id is read: model_name_or_path={id}"
#: Pattern of a name, the reason, and what can be done.
_OTHERS = (
    (
        r"^(openai/)?(gpt-?[345](?!all)|chatgpt|o[134](-(mini|pro))?$)|claude|gemini|^grok-?[3-9]",
        "has no published weights",
        _CLOSED,
    ),
    (r"^(.*/)?(distil|ro|de|al|modern)?berta?\b|electra|minilm|\bbge\b|\be5-", "is an encoder, which writes no text", _CLOSED),
    (r"^(.*/)?(flan-?|m|by)?t5\b|\bm?bart\b|pegasus", "is an encoder with a decoder; finetune trains decoders", _CLOSED),
    (r"whisper|wav2vec|stable.?diffusion|\bsdxl\b|\bflux\b", "is not a model of text", _CLOSED),
    (r"^gpt-?2\b", "is GPT-2", _BY_ID.format(id="openai-community/gpt2")),
    (r"llama[- ]?4(?![\d.b])", "is a Llama 4", _BY_ID.format(id="meta-llama/Llama-4-Scout-17B-16E-Instruct")),
    (
        r"deepseek[- ]?v[23](?!.*lite)",
        "is a mixture of over 200 billion parameters",
        _BY_ID.format(id="deepseek-ai/DeepSeek-V3"),
    ),
    (r"\bllava\b", "is a model of images and text", _BY_ID.format(id="llava-hf/llava-1.5-7b-hf")),
)


def why_unknown(typed: str) -> tuple[str, str] | None:
    """What a name that the catalogue lacks stands for, as a predicate, and what can be done; None if nobody knows."""
    name = typed.strip().lower()
    return next(((reason, fix) for pattern, reason, fix in _OTHERS if re.search(pattern, name)), None)
