"""Names of models that the catalogue does not have and that look like others: what they are, and what can be done."""

from __future__ import annotations

import re

#: What can be done where the named model can't be trained at all.
OTHER_MODELS = "Open models that are trained here: `finetune recipes`, or a model of the hub by its id."
_OFFLINE = "is not in the offline catalogue"
_BY_ID = "With the hub it is read by its id: model_name_or_path={id}."
_LARGE = "has more than a hundred billion parameters and is not in the offline catalogue"
#: Pattern of a name, the reason, and what can be done.
_OTHERS = (
    (r"^(openai/)?(gpt-?[345](?!all)|chatgpt|o[134](-(mini|pro))?$)|^(anthropic/)?claude|^(google/)?gemini|^grok-?[3-9]",
     "has no published weights", OTHER_MODELS),
    (r"^(.*/)?(distil|ro|de|al|modern)?berta?\b|electra|minilm|\bbge\b|\be5-",
     "is an encoder, which writes no text", OTHER_MODELS),
    (r"^(.*/)?(flan-?|m|by)?t5\b|\bm?bart\b|pegasus", "is an encoder with a decoder; finetune trains decoders", OTHER_MODELS),
    (r"whisper|wav2vec|stable.?diffusion|\bsdxl\b|\bflux\b", "is not a model of text", OTHER_MODELS),
    (r"^gpt-?2\b", _OFFLINE, _BY_ID.format(id="openai-community/gpt2")),
    (r"llama[- ]?4(?![\d.b])", _OFFLINE, _BY_ID.format(id="meta-llama/Llama-4-Scout-17B-16E-Instruct")),
    (r"deepseek[- ]?v[23](?!.*lite)", _OFFLINE, _BY_ID.format(id="deepseek-ai/DeepSeek-V3")),
    (r"\bllava\b", _OFFLINE, _BY_ID.format(id="llava-hf/llava-1.5-7b-hf")),
    (r"nemotron[- ]?3\.5[- ]lightning", _OFFLINE, _BY_ID.format(id="nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16")),
    (r"kimi[- ]?linear", _OFFLINE, _BY_ID.format(id="moonshotai/Kimi-Linear-48B-A3B-Instruct")),
    (r"olmo[- ]?hybrid", _OFFLINE, _BY_ID.format(id="allenai/Olmo-Hybrid-7B")),
    (r"ernie[- ]?4\.5[- ]21b", _OFFLINE, _BY_ID.format(id="baidu/ERNIE-4.5-21B-A3B-PT")),
    (r"mistral[- ]?small[- ]?4(?![.\d])", _LARGE, _BY_ID.format(id="mistralai/Mistral-Small-4-119B-2603")),
    (r"hunyuan", _OFFLINE, _BY_ID.format(id="tencent/Hunyuan-7B-Instruct")),
    (r"lfm[- ]?3(?![.\d])", _OFFLINE, _BY_ID.format(id="LiquidAI/LFM3-1.7B")),
    (r"qwen[- ]?3\.8[- ]?(max|2\.4t)", _LARGE, _BY_ID.format(id="Qwen/Qwen3.8-2.4T-A95B")),
    (r"qwen[- ]?3(\.5)?[- ](235|397|480)b", _LARGE, _BY_ID.format(id="Qwen/Qwen3-235B-A22B")),
    (r"kimi[- ]?k[23]", _LARGE, _BY_ID.format(id="moonshotai/Kimi-K2-Instruct")),
    (r"deepseek[- ]?v4", _LARGE, _BY_ID.format(id="deepseek-ai/DeepSeek-V4-Flash")),
    (r"minimax[- ]?m[123]", _LARGE, _BY_ID.format(id="MiniMaxAI/MiniMax-M2.7")),
    (r"nemotron[- ]?3[- ](super|ultra)", _LARGE, _BY_ID.format(id="nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8")),
    (r"mistral[- ]?large[- ]?3", _LARGE, _BY_ID.format(id="mistralai/Mistral-Large-3-675B-Instruct-2512")),
    (r"glm[- ]?(5(\.[12])?|4\.[67])(?![.\d])(?!.*flash)", _LARGE, _BY_ID.format(id="zai-org/GLM-5.2")),
    (r"glm[- ]?5\.3[- ]?flash",
     "is a glm5_next model, whose training step takes shapes from the values of tensors: its memory can't be forecast",
     "A model of its kind that can be: zai-org/GLM-4.7-Flash."),
    (r"gemma[- ]?3n",
     "is a gemma3n model, which transformers builds only where the timm library is installed",
     "pip install timm, and with the hub model_name_or_path=google/gemma-3n-E4B-it; or google/gemma-4-E4B-it without timm."),
    (r"\bmimo[- ]?7b",
     "is a mimo model: transformers lacks that type, so it needs code from its repository",
     "Read that code, then set trust_remote_code=true and model_revision to its full commit."),
)  # fmt: skip


def why_unknown(typed: str) -> tuple[str, str] | None:
    """What a name that the catalogue lacks stands for, as a predicate, and what can be done; None if nobody knows."""
    name = typed.strip().lower()
    return next(((reason, fix) for pattern, reason, fix in _OTHERS if re.search(pattern, name)), None)
