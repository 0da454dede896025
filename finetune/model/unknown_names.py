"""Names of models that the catalogue does not have and that look like others: what they are, and what can be done."""

from __future__ import annotations

import re

_CLOSED = "Open models that are trained here: `finetune recipes`, or a model of the hub by its id."
_OFFLINE = "is not in the offline catalogue"
_BY_ID = "With the hub it is read by its id: model_name_or_path={id}"
#: Pattern of a name, the reason, and what can be done.
_OTHERS = (
    (
        r"^(openai/)?(gpt-?[345](?!all)|chatgpt|o[134](-(mini|pro))?$)|^(anthropic/)?claude|^(google/)?gemini|^grok-?[3-9]",
        "has no published weights",
        _CLOSED,
    ),
    (r"^(.*/)?(distil|ro|de|al|modern)?berta?\b|electra|minilm|\bbge\b|\be5-", "is an encoder, which writes no text", _CLOSED),
    (r"^(.*/)?(flan-?|m|by)?t5\b|\bm?bart\b|pegasus", "is an encoder with a decoder; finetune trains decoders", _CLOSED),
    (r"whisper|wav2vec|stable.?diffusion|\bsdxl\b|\bflux\b", "is not a model of text", _CLOSED),
    (r"^gpt-?2\b", _OFFLINE, _BY_ID.format(id="openai-community/gpt2")),
    (r"llama[- ]?4(?![\d.b])", _OFFLINE, _BY_ID.format(id="meta-llama/Llama-4-Scout-17B-16E-Instruct")),
    (r"deepseek[- ]?v[23](?!.*lite)", _OFFLINE, _BY_ID.format(id="deepseek-ai/DeepSeek-V3")),
    (r"\bllava\b", _OFFLINE, _BY_ID.format(id="llava-hf/llava-1.5-7b-hf")),
)


def why_unknown(typed: str) -> tuple[str, str] | None:
    """What a name that the catalogue lacks stands for, as a predicate, and what can be done; None if nobody knows."""
    name = typed.strip().lower()
    return next(((reason, fix) for pattern, reason, fix in _OTHERS if re.search(pattern, name)), None)
