"""Load the tokenizer of a recipe's model, with its chat template and a safe pad token."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from finetune import hub
from finetune.data.report import shown
from finetune.errors import ModelError, RecipeError
from finetune.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A folder without any of these has no tokenizer, even if the library would make one from config.json.
_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "vocab.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip
#: Attribute of a tokenizer whose own chat template the recipe has replaced.
_REPLACED = "_replaced_template"
#: Usual pad tokens, best first; used only if in the vocabulary.
_PAD_NAMES = (
    "<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|PAD_TOKEN|>", "<|endoftext|>", "<|end_of_text|>",
    "<|reserved_special_token_0|>", "<unk>", "[UNK]",
)  # fmt: skip
#: The template of `chat_template: plain`, for base models that have none.
PLAIN_TEMPLATE = (
    "{% if bos_token %}{{ bos_token }}{% endif %}{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of `recipe.model_name_or_path`: a local folder, `tiny`, or a hub id; with `recipe.chat_template` set.

    Raises RecipeError when there is none or it is broken. Remote code runs only if the recipe allows it.
    """
    name = recipe.model_name_or_path
    place = _place(name)
    if isinstance(place, Path):
        _check_folder(place, name)
    tokenizer = _load(place, recipe)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(f"{name}: its tokenizer has no vocabulary (only {len(tokenizer)} special token(s))", _RESAVE)
    if recipe.chat_template is not None:
        own, tokenizer.chat_template = tokenizer.chat_template, _read_template(recipe.chat_template)
        vars(tokenizer)[_REPLACED] = bool(own) and own != tokenizer.chat_template
    choose_pad(tokenizer)
    return tokenizer


def is_replaced(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the recipe's chat template has replaced another one of the model's own."""
    return bool(vars(tokenizer).get(_REPLACED))


def choose_pad(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set a pad token from the vocabulary other than EOS, if there is one.

    Otherwise EOS pads. That is safe here: labels are made before padding, so padding is never trained on and the EOS of an
    answer always is. No token is added, as that would change the model's embeddings.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    vocabulary = tokenizer.get_vocab()
    free = [name for name in _PAD_NAMES if name in vocabulary and vocabulary[name] != tokenizer.eos_token_id]
    if free:
        tokenizer.pad_token = free[0]
    elif tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token


_RESAVE = "Save it next to the weights, for example:  AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)"


def _place(name: str) -> Path | str:
    """A local folder, or a hub id as it is."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - of an unknown user it stays as it is
    if path.is_dir():
        return path
    from finetune.bundled import model_path

    bundled = model_path(name)
    if bundled is not None:
        return bundled
    if path.is_file():
        raise ModelError(
            f"model_name_or_path: {shown(name, 200)} is a file", "Name the folder that holds config.json and the weights."
        )
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or (path.parent.is_dir() and path.parent != Path()):
        raise ModelError(
            f"model_name_or_path: there is no folder {shown(name, 200)}",
            "Write a model folder, or a hub id like Qwen/Qwen3-8B.",
        )
    return name


def run_tokenizer(folder: Path, recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer that a run has saved in `folder`. Code of its own runs only where the recipe trusts it.

    Raises RecipeError when it can't be read.
    """
    return _load(folder, recipe)


def _check_folder(folder: Path, name: str) -> None:
    if not any((folder / file).is_file() for file in _FILES):
        has = ", ".join(sorted(shown(entry.name) for entry in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"model_name_or_path: {shown(name, 200)} has no tokenizer (no tokenizer.json; it has {has})", _RESAVE)


def _load(place: Path | str, recipe: Recipe) -> PreTrainedTokenizerBase:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    name = recipe.model_name_or_path
    answers = isinstance(place, Path) or hub.is_reachable()
    try:
        return AutoTokenizer.from_pretrained(
            str(place),
            revision=recipe.model_revision if isinstance(place, str) else None,
            trust_remote_code=recipe.trust_remote_code,
        )
    except OSError as error:
        if isinstance(place, Path):
            raise ModelError(f"{name}: its tokenizer can't be read: {_first_line(error)}", _RESAVE) from None
        why = _first_line(error) if answers or hub.is_switched_off() else "the hub does not answer, and it is not in the cache"
        raise ModelError(
            f"model_name_or_path: {name} is not a local folder and can't be loaded from the hub: {why}",
            "Check the spelling and the network; for a private or gated model run  hf auth login",
        ) from None
    except (
        StrictDataclassError, ValueError, LookupError, TypeError, AttributeError, ImportError, RecursionError, ArithmeticError
    ) as error:  # fmt: skip
        raise ModelError(f"{name}: its tokenizer can't be read: {_first_line(error)}", _RESAVE) from None


def _read_template(text: str) -> str:
    """The Jinja text that `chat_template` names: a file, or `plain`."""
    if text == "plain":
        return PLAIN_TEMPLATE
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - of an unknown user it stays as it is
    try:
        template = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise RecipeError(f"chat_template: {shown(text, 200)} is not UTF-8 text", "Give the path of a Jinja file.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(
            f"chat_template: {shown(text, 200)} can't be read: {reason}", "Give the path of a Jinja file, or plain."
        ) from None
    if not template.strip():
        raise RecipeError(f"chat_template: {shown(text, 200)} is empty", "Give the path of a Jinja file, or plain.")
    return template


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).split("\n") if line.strip()]
    return shown(lines[0], 300) if lines else type(error).__name__
