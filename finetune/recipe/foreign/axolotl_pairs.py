"""Axolotl's keys and datasets for training on pairs of answers (`rl`)."""

from __future__ import annotations

from typing import Any

from finetune.recipe.foreign import common
from finetune.recipe.foreign.preferences import (
    LABEL_SMOOTHING,
    NO_WEIGHTING,
    has_pairs_or_labels,
    read_loss,
    read_method,
    read_preferences,
    row_format_of,
)
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, each
from finetune.recipe.foreign.shared import own_template_note

PAIR_KEYS: dict[str, Rule] = {
    **each(common.MEMORY, "precompute_ref_log_probs dpo_padding_free"),
    **each(common.OTHER_METHOD, "vllm kto_desirable_weight kto_undesirable_weight simpo_gamma cpo_alpha"),
    "rl_beta": Keep("beta", float), "trl": Read(), "dpo_loss_type": Read(), "dpo_loss_weights": Refuse("one loss", ([1.0],)),
    "dpo_label_smoothing": LABEL_SMOOTHING, "dpo_use_weighting": NO_WEIGHTING, "dpo_use_liger_kernel": common.KERNELS,
    "max_prompt_len": Ignore("pairs have no limit of their own for prompts, as there"),
    "orpo_alpha": Refuse("there it is beta where rl_beta is absent; set rl_beta"),
}  # fmt: skip
_KTO_KEYS: dict[str, Rule] = {
    "kto_desirable_weight": Keep("desirable_weight", float), "kto_undesirable_weight": Keep("undesirable_weight", float),
    "dpo_loss_type": common.OTHER_METHOD, "dpo_loss_weights": common.OTHER_METHOD, "dpo_label_smoothing": common.OTHER_METHOD,
}  # fmt: skip

#: What Axolotl's types of text in a fixed template call the columns.
_TEXT_TYPES: dict[str, dict[str, str]] = {
    "intel": {"instruction": "question"}, "icr": {"instruction": "input"}, "prompt_pairs": {"instruction": "prompt"},
    "argilla": {"chosen": "chosen_response", "rejected": "rejected_response"}, "argilla_chat": {}, "ultra": {},
}  # fmt: skip
#: The same of labelled answers, which are in the column completion.
_LABELLED_TYPES: dict[str, dict[str, str]] = {
    "intel": {"instruction": "question"}, "prompt_pairs": {"instruction": "prompt"}, "ultra": {"instruction": "prompt"},
    "argilla": {}, "argilla_chat": {"messages": "completion"},
}  # fmt: skip
_TEMPLATES = {"chatml": "ChatML", "llama3": "Llama 3's template"}


def read_rl(config: ConfigReader) -> str:
    """The method of `rl`; empty where it is refused."""
    ipo = str(config.value("rl")).lower() == "ipo"
    method = read_method(config, "rl", {"sft": "sft", "dpo": "dpo", "ipo": "dpo", "kto": "kto"})
    rules, trl = PAIR_KEYS | (_KTO_KEYS if row_format_of(method) == "labelled" else {}), config.value("trl")
    prefers = has_pairs_or_labels(method)
    if prefers and isinstance(trl, dict) and trl.get("beta") is not None:
        config.keep("trl", "beta", float(trl["beta"]))
        rules["rl_beta"] = Ignore("trl.beta counts")
    if method == "dpo" and ipo:
        config.settings["loss_type"], config.keys_by_setting["loss_type"] = "ipo", "rl"
        config.ignore("dpo_loss_type", "rl is ipo")
    elif method == "dpo":
        read_loss(config, "dpo_loss_type")
    read_preferences(config, rules, method)
    if prefers:
        config.ignore("train_on_inputs", "prompts are not trained, as there")
        config.settings.pop("train_on_inputs", None)
        if "trl" not in config.entries:
            config.ignore("trl", "has no beta; the other keys are of methods that reward")
    return method


def columns_of_pairs(kind: Any, entry: dict[str, Any], model: str) -> tuple[dict[str, str], str, str]:
    """Columns of a dataset of pairs, a note, and the reason why it can't be read; removes its keys from `entry`."""
    own_format = kind if isinstance(kind, dict) else {}
    keys = {**entry, **own_format}
    columns = {field: str(keys.get(f"field_{field}") or field) for field in ("chosen", "rejected")}
    for field in columns:
        entry.pop(f"field_{field}", None)
    template, _, name = str(kind).partition(".")
    reason = ""
    if kind is None or own_format or kind in ("passthrough", "passthrough.default", "user_defined", "user_defined.default"):
        reason = _text_around(own_format, ("prompt", "chosen", "rejected"))
        columns["prompt"] = str(own_format.get("field_prompt") or "prompt")
    elif template in _TEMPLATES and name in _TEXT_TYPES:
        columns |= _TEXT_TYPES[name]
    elif template in _TEMPLATES and name in ("", "default"):
        alternative = f"name it: {template}.intel is question"
        reason = f"type {kind} takes prompts from prompt, input, question or instruction; {alternative}"
    elif kind not in ("chat_template", "chat_template.default", "chat_template.argilla_chat"):
        reason = f"type {kind} is unknown for pairs, and decides what rows look like"
    renamed = {field: column for field, column in columns.items() if field != column}
    return renamed, _template_note(template, model), reason


def columns_of_labels(kind: Any, entry: dict[str, Any], model: str) -> tuple[dict[str, str], str, str]:
    """Columns of a dataset of answers marked good or bad, a note, and the reason why it can't be read."""
    template, _, name = str(kind).partition(".")
    if isinstance(kind, dict):
        columns = {field: str(kind.get(f"field_{field}") or field) for field in ("prompt", "completion", "label")}
        renamed = {field: column for field, column in columns.items() if field != column}
        return renamed, "", _text_around(kind, ("prompt", "completion"))
    if template not in _TEMPLATES or name not in _LABELLED_TYPES:
        return {}, "", f"type {kind} is unknown for method kto, and decides what rows look like"
    columns = dict(_LABELLED_TYPES[name])
    columns |= {} if "messages" in columns else {"output": "completion"}
    return columns, _template_note(template, model), ""


def _text_around(own_format: dict[str, Any], fields: tuple[str, ...]) -> str:
    """Why a prompt of one's own can't be used: it writes text around a field. Empty for one that doesn't."""
    for field in fields:
        if own_format.get(f"{field}_format") not in (None, "", f"{{{field}}}"):
            return f"{field}_format is text around the rows, which is not written here: write it into the rows"
    return ""


def _template_note(template: str, model: str) -> str:
    """What to say of rows that Axolotl writes in a template that is not the model's own."""
    if template not in _TEMPLATES or own_template_note(template, model) == "":
        return ""
    return f"Axolotl writes {_TEMPLATES[template]} around these rows; here the model's own template is used"
