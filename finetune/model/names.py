"""Informal model names, resolved to hub ids of the catalogue."""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from finetune.model.catalogue import entries

#: Words in the names of copies that are quantised or packed for inference.
_PACKING = re.compile(
    r"(?<![a-z0-9])(?:gguf|awq|gptq|exl[23]|mlx|bnb|nf4|fp[48]|nvfp4|mxfp4|hqq|eetq|aqlm|onnx|quantized|dynamic|imatrix|i1|unsloth"
    r"|w\d+a\d+|i?q\d+(?:_[a-z0-9]+)*|int[48]|[2-8]bits?|[2-8]bpw|bf16|fp16|f16)(?![a-z0-9])"
)
_MAX_SUGGESTIONS = 4
#: Fix where the named model can't be trained at all.
OTHER_MODELS = "Choose an open model: `finetune recipes` lists them. Or give a hub id."
_OFFLINE = "is not in the offline catalogue"
_LARGE = "has more than a hundred billion parameters and is not in the offline catalogue"
#: Pattern of a model's name, why it is not in the catalogue, and its hub id or another fix.
_NOT_IN_CATALOGUE = (
    (r"^(openai/)?(gpt-?[345](?!all)|chatgpt|o[134](-(mini|pro))?$)|^(anthropic/)?claude|^(google/)?gemini|^grok-?[3-9]",
     "has no published weights", OTHER_MODELS),
    (r"^(.*/)?(distil|ro|de|al|modern)?berta?\b|electra|minilm|\bbge\b|\be5-",
     "is an encoder and generates no text", OTHER_MODELS),
    (r"^(.*/)?(flan-?|m|by)?t5\b|\bm?bart\b|pegasus", "is an encoder with a decoder; finetune trains decoders", OTHER_MODELS),
    (r"whisper|wav2vec|stable.?diffusion|\bsdxl\b|\bflux\b", "is not a text model", OTHER_MODELS),
    (r"^gpt-?2\b", _OFFLINE, "openai-community/gpt2"),
    (r"llama[- ]?4(?![\d.b])", _OFFLINE, "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    (r"deepseek[- ]?v[23](?!.*lite)", _OFFLINE, "deepseek-ai/DeepSeek-V3"),
    (r"\bllava\b", _OFFLINE, "llava-hf/llava-1.5-7b-hf"),
    (r"nemotron[- ]?3\.5[- ]lightning", _OFFLINE, "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16"),
    (r"kimi[- ]?linear", _OFFLINE, "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    (r"olmo[- ]?hybrid", _OFFLINE, "allenai/Olmo-Hybrid-7B"),
    (r"ernie[- ]?4\.5[- ]21b", _OFFLINE, "baidu/ERNIE-4.5-21B-A3B-PT"),
    (r"mistral[- ]?small[- ]?4(?![.\d])", _LARGE, "mistralai/Mistral-Small-4-119B-2603"),
    (r"hunyuan", _OFFLINE, "tencent/Hunyuan-7B-Instruct"),
    (r"lfm[- ]?3(?![.\d])", _OFFLINE, "LiquidAI/LFM3-1.7B"),
    (r"qwen[- ]?3\.8[- ]?(max|2\.4t)", _LARGE, "Qwen/Qwen3.8-2.4T-A95B"),
    (r"qwen[- ]?3(\.5)?[- ](235|397|480)b", _LARGE, "Qwen/Qwen3-235B-A22B"),
    (r"kimi[- ]?k[23]", _LARGE, "moonshotai/Kimi-K2-Instruct"),
    (r"deepseek[- ]?v4", _LARGE, "deepseek-ai/DeepSeek-V4-Flash"),
    (r"minimax[- ]?m[123]", _LARGE, "MiniMaxAI/MiniMax-M2.7"),
    (r"nemotron[- ]?3[- ](super|ultra)", _LARGE, "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8"),
    (r"mistral[- ]?large[- ]?3", _LARGE, "mistralai/Mistral-Large-3-675B-Instruct-2512"),
    (r"glm[- ]?(5(\.[12])?|4\.[67])(?![.\d])(?!.*flash)", _LARGE, "zai-org/GLM-5.2"),
    (r"glm[- ]?5\.3[- ]?flash",
     "is a glm5_next model; its memory can't be forecast, because tensor values decide shapes in its training step",
     "Use a similar model: zai-org/GLM-4.7-Flash."),
    (r"gemma[- ]?3n",
     "is a gemma3n model, which needs the timm package",
     "Run `pip install timm` and set model_name_or_path=google/gemma-3n-E4B-it, or use google/gemma-4-E4B-it without timm."),
    (r"\bmimo[- ]?7b",
     "is a mimo model, a type that transformers lacks: it needs code from its repository",
     "Read that code, then set trust_remote_code=true and model_revision to its full commit."),
)  # fmt: skip


class Match(NamedTuple):
    """A hub id for a typed name, and a note on the difference."""

    name: str
    note: str


# A name is known if it is an id, an id without its account, a packed copy (GGUF, AWQ, bnb-4bit) of a model, or in names.json.
# Case, spaces, punctuation and the spelling of "chat" do not count. Never another model.
def resolve(typed: str) -> Match | None:
    """Return the catalogue's id for `typed`, or None."""
    account, _, name = _without_address(typed).rpartition("/")
    hub_id = _ids_by_last_part().get(name)
    if hub_id is None or account not in ("", hub_id.partition("/")[0].lower()):
        hub_id = _id_of_variant(account, name)
    if hub_id is None:
        return None
    packing = "-".join(_PACKING.findall(name)).upper()
    packed = f" ({packing} weights are packed for inference; LoRA trains the original)" if packing else ""
    return Match(hub_id, "" if hub_id == typed else f"{typed} -> {hub_id}{packed}")


def suggestions(typed: str) -> list[str]:
    """Return ids that begin with the name, and similar ids if fewer than two do."""
    # known not to be in the catalogue
    if why_unknown(typed):
        return []
    ids = _ids_by_last_part()
    name = re.sub(r"[ _:]+", "-", _without_address(typed).rpartition("/")[2])
    matches = [hub_id for last, hub_id in ids.items() if last.startswith(f"{name}-")]
    if len(matches) < 2:
        matches += [ids[last] for last in difflib.get_close_matches(name, ids, n=_MAX_SUGGESTIONS)]
    return list(dict.fromkeys(matches))[:_MAX_SUGGESTIONS]


def why_unknown(typed: str) -> tuple[str, str] | None:
    """Return why the catalogue lacks a known model, as a predicate, and the fix; or None."""
    for pattern, reason, fix in _NOT_IN_CATALOGUE:
        if re.search(pattern, typed.strip().lower()):
            is_sentence = " " in fix
            return reason, fix if is_sentence else f"Read it from the hub: model_name_or_path={fix}."
    return None


def _without_address(typed: str) -> str:
    address = r"^(https?://)?(huggingface\.co|hf\.co)/|/(tree|blob|resolve)/.*$"
    return re.sub(address, "", typed.strip().lower()).strip("/ ")


def _id_of_variant(account: str, name: str) -> str | None:
    account = _names_file()["accounts"].get(account, account)
    is_copy = not account or account in _names_file()["copies"]
    # a copy may have the owner's account in its name: bartowski/Qwen_Qwen3-8B-GGUF
    owners = {hub_id.partition("/")[0].lower() for hub_id in entries()}
    owner, _, model_name = name.partition("_")
    hub_id = _ids_by_key().get(_key(model_name if model_name and owner in owners else name))
    return hub_id if hub_id and (is_copy or hub_id.lower().startswith(f"{account}/")) else None


def _key(name: str) -> str:
    """Return the name without packing and punctuation, with `+chat` or `+base` for a last word like `instruct` or `pt`."""
    chat_suffix = re.compile(r"(instruct|instruction|inst|chat|it)$")
    family, _, tag = _PACKING.sub("", name).rstrip("-_:. ").partition(":")
    if tag not in ("", "latest"):
        return f"{_without_punctuation(family)}:{chat_suffix.sub('', _without_punctuation(tag))}"
    return re.sub(r"(base|pt)$", "+base", chat_suffix.sub("+chat", _without_punctuation(family).removesuffix("hf")))


def _without_punctuation(name: str) -> str:
    hyphenated = re.sub(r"[^a-z0-9.]+", "-", name)
    # keep a hyphen between digits: gemma-2-2b is not gemma-22b
    return re.sub(r"(?<!\d)-|-(?!\d)", "", hyphenated)


@cache
def _ids_by_last_part() -> dict[str, str]:
    return {hub_id.lower().rpartition("/")[2]: hub_id for hub_id in entries()}


@cache
def _names_file() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8")))


@cache
def _ids_by_key() -> dict[str, str]:
    ids = {_key(short): name for short, name in _names_file()["names"].items()}
    for family, template in _names_file()["tags"].items():
        pattern = re.compile(re.escape(template).replace(r"\{\}", "([^-]*)"))
        ids |= {_key(f"{family}:{match[1].lower()}"): match[0] for name in entries() if (match := pattern.fullmatch(name))}
    copies = tuple(f"{account}/" for account in _names_file()["copies"])
    for last, name in _ids_by_last_part().items():
        if not (name.lower().startswith(copies) and _PACKING.search(last)):
            ids[_key(last)] = name
    return ids
