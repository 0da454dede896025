"""Add a recipe's new tokens, and find their embedding rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.data.report import printable
from finetune.errors import DataError, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.settings import Recipe


def add_tokens(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Add the recipe's new tokens. Raise RecipeError for tokens in the vocabulary."""
    from transformers import AddedToken

    if not recipe.new_tokens:
        return
    names, vocabulary = list(recipe.new_tokens), tokenizer.get_vocab()
    owned = {
        name: vocabulary.get(name, ids[0])
        for name, ids in zip(names, _ids(tokenizer, names), strict=True)
        if name in vocabulary or (len(ids) == 1 and str(tokenizer.decode(ids)).strip() == name)
    }
    model = recipe.model_name_or_path
    if problems := [f"new_tokens: {printable(name)} is a token of {model} already ({row})" for name, row in owned.items()]:
        raise RecipeError(_first(problems), "Leave out what the model has.")
    # ordinary tokens, which answers show
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    vocabulary = tokenizer.get_vocab()
    split_up = [name for name, ids in zip(names, _ids(tokenizer, names), strict=True) if vocabulary[name] not in ids]
    if problems := [f"new_tokens: {printable(name)} is several tokens to this tokenizer all the same" for name in split_up]:
        raise RecipeError(_first(problems), "Give other tokens, for example <|name|>.")


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _first(problems: list[str]) -> list[str]:
    return problems[:5] + ([f"new_tokens: and {len(problems) - 5} more"] if len(problems) > 5 else [])


def rows_of_tokens(tokenizer: PreTrainedTokenizerBase, recipe: Recipe, model_rows: int | None, highest: int) -> list[int]:
    """Return first and end of the trained embedding rows, empty without any. Raise DataError."""
    # Trained: the recipe's new tokens, and tokens that were added to the tokenizer beyond the model's rows and occur in
    # the data, whose largest token is `highest`.
    end = max(tokenizer.get_vocab().values()) + 1
    first = end - len(recipe.new_tokens)
    if model_rows is None or max(highest, first if recipe.new_tokens else 0) < model_rows or first == model_rows:
        return [first, end] if recipe.new_tokens else []
    added = tokenizer.added_tokens_decoder
    # tokens that were not added belong to another model
    if strangers := [token_id for token_id in range(model_rows, end) if token_id not in added]:
        token_id = highest if highest in strangers else strangers[0]
        raise DataError(
            f"the rows have the token {highest} and the tokenizer {token_id} "
            f"({printable(str(tokenizer.convert_ids_to_tokens(token_id)))}), and {recipe.model_name_or_path} has "
            f"{model_rows:,} tokens",
            "Its tokenizer is of another model: put back the base model's own tokenizer files.",
        )
    return [min(first, model_rows), end]
