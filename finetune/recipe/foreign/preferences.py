"""Training on pairs of answers in other tools' files: its loss, and the methods that finetune doesn't have."""

from __future__ import annotations

from finetune.recipe.foreign import common
from finetune.recipe.foreign.rules import ConfigReader, Refuse, Rule, is_off
from finetune.settings.methods import METHODS

_GENERATED = "the nearest is method dpo, on pairs that exist; there answers are generated and rewarded in the training"
_NO_REFERENCE = "the nearest is method dpo, which compares with the model before the training; {name} has no such reference"
_ONE_ANSWER = "of pairs the nearest is sigmoid; method kto learns from single answers that are marked good or bad"
_BARE_REFERENCE = "there the reference is the base model; here, with adapter: RUN in a recipe, it is that adapter"
_SCORES = "the nearest is method dpo, which trains the model itself on the same pairs; a reward model only scores answers"
#: Methods of other tools -> the nearest here, and why it isn't the same.
OTHER_METHODS = {
    "orpo": f"{_NO_REFERENCE.format(name='ORPO')}, and learns the chosen answers, too", "kto": _ONE_ANSWER,
    "simpo": f"{_NO_REFERENCE.format(name='SimPO')}, and wants a margin of means over the tokens",
    "cpo": f"{_NO_REFERENCE.format(name='CPO')}, and learns the chosen answers, too", "rm": _SCORES, "reward": _SCORES,
    **dict.fromkeys(("ppo", "grpo", "gdpo", "rloo", "ebft"), _GENERATED),
    "pt": "the nearest is method sft on rows of text, each a sequence; there texts are joined and cut into equal pieces",
}  # fmt: skip
LABEL_SMOOTHING = Refuse("label smoothing changes the loss: in a pair the preferred answer is certain here")
OTHER_REFERENCE = Refuse("the reference is the model without its adapter")
NO_WEIGHTING = Refuse("every pair and token counts alike")


def row_format_of(method: str) -> str | None:
    """The only format of the method's rows: `preference` for pairs, `labelled` for labels; None for any or no method."""
    return METHODS[method].row_format if method in METHODS else None


def has_pairs_or_labels(method: str) -> bool:
    """Whether the method learns from answers that are preferred, or marked good or bad."""
    return row_format_of(method) in ("preference", "labelled")


def read_method(config: ConfigReader, key: str, names: dict[str, str]) -> str:
    """The method here by its name there, sft where that is absent; empty where it is refused."""
    name = str(config.value(key)).lower() if config.is_on(key) else "sft"
    if config.is_replaced("method", [key]):
        return str(config.overrides["method"])
    if name not in names:
        config.refuse(key, OTHER_METHODS.get(name, f"the methods here are {' and '.join(names.values())}"))
        if name in OTHER_METHODS:
            config.settings.setdefault("dataset.path", "refused")  # its absence is not a second problem
            return ""
    elif names[name] != "sft":
        config.keep(key, "method", names[name])
    else:
        config.ignore(key, "is what finetune does")
    return names.get(name, "sft")


def read_preferences(config: ConfigReader, rules: dict[str, Rule], method: str) -> None:
    """Keys for pairs or labels, which have no effect without them; what the other tools have where they are absent."""
    for key, rule in rules.items():
        if key in config.values and has_pairs_or_labels(method):
            config.apply(key, rule)
        else:
            config.ignore(key, common.PREFERENCE.reason)
    if has_pairs_or_labels(method):
        usual = {"beta": 0.1, "loss_type": next(iter(METHODS[method].losses), None)}
        for name in sorted(usual.keys() & set(METHODS[method].settings)):
            config.assume(name, usual[name])
        if config.is_on("lora_dropout") and "lora_dropout" not in config.overrides:
            config.keep("lora_dropout", "lora_dropout", 0.0, f"{config.tool.name} turns dropout off in {method.upper()}")
        config.assume("lora_dropout", 0.0)
        for key in filter(config.is_on, ("adapter_name_or_path", "lora_model_dir")):
            config.entries.pop(key)  # refused there for what this doesn't lift
            config.refuse(key, _BARE_REFERENCE)


def read_loss(config: ConfigReader, key: str, method: str = "dpo") -> None:
    """The loss of the method: a name, or a list with one."""
    names = config.value(key)
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    losses = METHODS[method].losses
    if is_off(name):
        config.ignore(key, "is not set")
    elif name in losses:
        config.keep(key, "loss_type", name)
    elif isinstance(name, str) and name.removesuffix("_pair") in OTHER_METHODS:
        config.refuse(key, OTHER_METHODS[name.removesuffix("_pair")], "loss_type")
    else:
        config.refuse(
            key, f"the losses of method {method} are {', '.join(losses)}, one at a time; sft_weight adds SFT's", "loss_type"
        )
