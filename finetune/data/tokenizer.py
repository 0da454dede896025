"""Load a model's tokenizer, with its chat template and a safe pad token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import hub
from finetune.bundled import model_path
from finetune.data.report import first_line, printable
from finetune.errors import DataError, ModelError, RecipeError
from finetune.files import IS_LFS_POINTER, LFS_FIX, expanded, is_lfs_pointer, sha256_of
from finetune.settings import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.pictures.processing import PictureProcessor

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # files with the settings of a processor
_SUFFIXES = {".json", ".jinja", ".model", ".txt"}  # suffixes of files that transformers reads with a tokenizer
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
    """Load a recipe's tokenizer, chat template and new tokens. Raise RecipeError."""
    name = recipe.model_name_or_path
    tokenizer = read_tokenizer(_path_or_hub_id(name), recipe)
    # transformers makes up a tokenizer of special tokens alone for a folder without its files
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(f"{name}: its tokenizer has no vocabulary (only {len(tokenizer)} special token(s))", _SAVE_HINT)
    if recipe.chat_template is not None:
        tokenizer.chat_template = _read_template(recipe.chat_template)
    choose_pad(tokenizer)
    add_tokens(tokenizer, recipe)
    return tokenizer


class ProcessorLoader:
    """Loads the image processor of a recipe's model, or of a run's `folder`."""

    def __init__(self, recipe: Recipe, folder: Path | None = None) -> None:
        self._recipe = recipe
        self._path = _path_or_hub_id(recipe.model_name_or_path) if folder is None else folder

    @property
    def identity(self) -> list[Any]:
        """Return everything that decides an image's tokens beside the tokenizer."""
        # a hub id's files depend on its revision, which is compared elsewhere
        paths = [self._path / name for name in _PROCESSOR_FILES] if isinstance(self._path, Path) else []
        return [self._recipe.pixel_limit, *(sha256_of(path) for path in paths if path.is_file())]

    def __call__(self, tokenizer: PreTrainedTokenizerBase) -> PictureProcessor:
        """Load the processor, or raise ModelError."""
        from finetune.compat.processors import load_processor
        from finetune.data.pictures.processing import PictureProcessor
        from finetune.data.pictures.source import require_pillow

        require_pillow()
        revision = self._recipe.model_revision if isinstance(self._path, str) else None
        try:
            processor = load_processor(str(self._path), tokenizer, revision=revision)
        except Exception as error:  # noqa: BLE001 - transformers raises whatever its code meets
            name = self._recipe.model_name_or_path
            raise ModelError(
                f"the rows have images, and the processor of {name} can't be used: {first_line(error)}",
                "Give a model of images and text with its preprocessor_config.json or processor_config.json.",
            ) from None
        return PictureProcessor(processor, self._recipe.pixel_limit)


def choose_pad(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set a pad token other than EOS, if the vocabulary has one."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    vocabulary = tokenizer.get_vocab()
    candidates = [name for name in _PAD_NAMES if name in vocabulary and vocabulary[name] != tokenizer.eos_token_id]
    if candidates:
        tokenizer.pad_token = candidates[0]
    elif tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        # Safe: labels are made before padding, so an answer's EOS is always trained on and padding never is.
        # A new token would change the model's embeddings.
        tokenizer.pad_token = tokenizer.eos_token


_SAVE_HINT = "Save it next to the weights, for example:  AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)"


def _path_or_hub_id(name: str) -> Path | str:
    path = expanded(name)
    return path if path.is_dir() else model_path(name) or name


def read_tokenizer(path_or_id: Path | str, recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id, unchanged. Raise ModelError."""
    from transformers import AutoTokenizer

    from finetune.compat.transformers import without_session_id

    without_session_id()
    name = recipe.model_name_or_path
    entries = path_or_id.iterdir() if isinstance(path_or_id, Path) else ()
    files = (path for path in entries if path.suffix in _SUFFIXES and path.is_file())
    if problems := [f"{printable(str(file), 200)} {IS_LFS_POINTER}" for file in files if is_lfs_pointer(file)]:
        raise ModelError(problems, f"Download the tokenizer again, or in the cloned folder: {LFS_FIX}")
    is_reachable = isinstance(path_or_id, Path) or hub.is_reachable()  # comes first: it may set the libraries offline
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path_or_id),
            revision=recipe.model_revision if isinstance(path_or_id, str) else None,
            # without it, code from another repository is taken at its newest commit
            code_revision=recipe.model_revision,
            trust_remote_code=recipe.trust_remote_code,
        )
        tokenizer.convert_tokens_to_ids(tokenizer.all_special_tokens)  # raises if the unknown token isn't in the vocabulary
        return tokenizer
    except BaseException as error:  # noqa: BLE001 - tokenizers panics, transformers raises whatever its code meets
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        if isinstance(path_or_id, Path) or not isinstance(error, OSError):
            raise ModelError(f"{name}: its tokenizer can't be read: {first_line(error)}", _SAVE_HINT) from None
        unreachable = not is_reachable and not hub.is_switched_off()
        reason = "the hub does not answer, and it is not in the cache" if unreachable else first_line(error)
        raise ModelError(
            f"model_name_or_path: {name} is not a local folder and can't be loaded from the hub: {reason}",
            "Check the spelling and the network; for a private or gated model run  hf auth login",
        ) from None


def _read_template(text: str) -> str:
    if text == "plain":
        return PLAIN_TEMPLATE
    path = expanded(text)
    label, fix = f"chat_template: {printable(text, 200)}", "Give the path of a Jinja file, or plain."
    try:
        template = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        is_not_text = isinstance(error, UnicodeDecodeError)
        reason = "is not UTF-8 text" if is_not_text else f"can't be read: {getattr(error, 'strerror', None) or error}"
        raise RecipeError(f"{label} {reason}", fix) from None
    if not template.strip():
        raise RecipeError(f"{label} is empty", fix)
    return template


def add_tokens(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Add the recipe's new tokens. Raise RecipeError for tokens that exist already or stay split."""
    from transformers import AddedToken

    if not recipe.new_tokens:
        return
    names, vocabulary = list(recipe.new_tokens), tokenizer.get_vocab()
    existing_ids = {
        name: vocabulary.get(name, ids[0])
        for name, ids in zip(names, _ids(tokenizer, names), strict=True)
        # a byte-level token's name differs from its text
        if name in vocabulary or (len(ids) == 1 and str(tokenizer.decode(ids)).strip() == name)
    }
    fact = f"is a token of {recipe.model_name_or_path} already"
    if problems := [f"new_tokens: {printable(name)} {fact} ({token_id})" for name, token_id in existing_ids.items()]:
        raise RecipeError(_first_five(problems), "Leave out the model's own tokens.")
    # not special: decoding with skip_special_tokens keeps them
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    vocabulary = tokenizer.get_vocab()
    split_up = [name for name, ids in zip(names, _ids(tokenizer, names), strict=True) if vocabulary[name] not in ids]
    if problems := [f"new_tokens: {printable(name)} is still several tokens to this tokenizer" for name in split_up]:
        raise RecipeError(_first_five(problems), "Give other tokens, for example <|name|>.")


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _first_five(problems: list[str]) -> list[str]:
    return problems[:5] + ([f"new_tokens: and {len(problems) - 5} more"] if len(problems) > 5 else [])


def trained_embedding_rows(
    tokenizer: PreTrainedTokenizerBase, recipe: Recipe, model_rows: int | None, highest_token: int
) -> list[int]:
    """Return first and end of the trained embedding rows, empty without any. Raise DataError."""
    # Trained: the recipe's new tokens, and tokens that were added to the tokenizer beyond the model's rows and occur in
    # the data, whose highest id is `highest_token`.
    end = max(tokenizer.get_vocab().values()) + 1
    first_new = end - len(recipe.new_tokens)  # they have the last ids
    highest_used = max(highest_token, first_new if recipe.new_tokens else 0)
    if model_rows is None or highest_used < model_rows or first_new == model_rows:
        return [first_new, end] if recipe.new_tokens else []
    added = tokenizer.added_tokens_decoder
    # tokens that were not added belong to another model
    if foreign_ids := [token_id for token_id in range(model_rows, end) if token_id not in added]:
        token_id = highest_token if highest_token in foreign_ids else foreign_ids[0]
        raise DataError(
            f"the rows have the token {highest_token} and the tokenizer {token_id} "
            f"({printable(str(tokenizer.convert_ids_to_tokens(token_id)))}), and {recipe.model_name_or_path} has "
            f"{model_rows:,} tokens",
            "The tokenizer belongs to another model: restore the base model's tokenizer files.",
        )
    return [min(first_new, model_rows), end]
