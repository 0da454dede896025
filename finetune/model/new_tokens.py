"""Trained embedding rows for new tokens, by PEFT's trainable tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.settings import Settings

#: Suffix of the trained rows' names in an adapter's file.
TRAINED_ROWS = ".token_adapter.trainable_tokens_delta"
#: Attribute of a grown weight with its number of rows in the checkpoint.
LOADED_ROWS = "_loaded_rows"


def grow_vocabulary(model: Any, settings: Settings, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Add the rows of new tokens to a base model. Raises RecipeError for a vocabulary that can't grow."""
    if not settings.trained_embedding_rows:
        return
    embedding, head = _embedding_and_head(model)
    is_tied = head.weight is embedding.weight
    if settings.trained_embedding_rows[1] > embedding.num_embeddings:
        _require_one_table(model, embedding)
    # a new row is the mean of the rows of its text's tokens, or of all earlier rows; a model on meta needs no tokenizer
    text_tokens = {} if tokenizer is None else _text_tokens(settings, tokenizer)
    weight = _grown(embedding.weight, settings, text_tokens)
    embedding.weight, embedding.num_embeddings = weight, len(weight)
    head.weight = weight if is_tied else _grown(head.weight, settings, text_tokens)
    head.out_features = len(head.weight)


def _embedding_and_head(model: Any) -> tuple[Any, Any]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_plain = isinstance(embedding, torch.nn.Embedding) and type(head) is torch.nn.Linear and head.bias is None
    if not is_plain:
        raise RecipeError(f"new_tokens: the rows of a {model.config.model_type} model's embedding can't be trained alone")
    return embedding, head


def _require_one_table(model: Any, embedding: Any) -> None:
    others = [part for part in model.modules() if isinstance(part, torch.nn.Embedding) and part is not embedding]
    # per-layer embeddings by token, as in Gemma 3n
    if any(other.num_embeddings >= embedding.num_embeddings // 2 for other in others):
        raise RecipeError(f"new_tokens: a {model.config.model_type} model has several embedding tables")


def _text_tokens(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> dict[int, list[int]]:
    # row of a new token -> the token ids of its text
    vocabulary = tokenizer.get_vocab()
    texts = {vocabulary[name]: text for name, text in settings.new_tokens.items() if text.strip()}
    return {row: tokenizer(text, add_special_tokens=False)["input_ids"] for row, text in texts.items()}


@torch.no_grad()
def _grown(weight: torch.nn.Parameter, settings: Settings, text_tokens: dict[int, list[int]]) -> torch.nn.Parameter:
    first, end = settings.trained_embedding_rows
    rows, width = weight.shape
    grown = weight.new_empty(max(rows, end), width)
    grown[:rows] = weight
    if not weight.is_meta:
        earlier_rows = min(first, rows)
        # new tokens may take rows of padding that the checkpoint has already; means in fp32
        grown[min(rows, end - len(settings.new_tokens)) : end] = weight[:earlier_rows].mean(dim=0, dtype=torch.float32)
        for row, tokens in text_tokens.items():
            if tokens := [token for token in tokens if token < earlier_rows]:
                grown[row] = weight[tokens].mean(dim=0, dtype=torch.float32)
    parameter = torch.nn.Parameter(grown, requires_grad=False)
    setattr(parameter, LOADED_ROWS, rows)
    return parameter


def token_indices(model: Any, settings: Settings) -> dict[str, list[int]] | None:
    """Return PEFT's `trainable_token_indices`: trained rows by module name."""
    if not settings.trained_embedding_rows:
        return None
    embedding, head = _embedding_and_head(model)
    tables = [embedding] if head.weight is embedding.weight else [embedding, head]
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(table)]: list(range(*settings.trained_embedding_rows)) for table in tables}


def check_wrapped(model: Any) -> None:
    """Let TRL's loss read PEFT's wrapper of the output layer. Raises RecipeError without the wrapper."""
    head = model.get_output_embeddings()
    if not hasattr(head, "token_adapter"):
        raise RecipeError(f"new_tokens: PEFT does not tie the rows of a {model.config.model_type} model's output layer")
    head.bias = None  # TRL's loss reads it, and the wrapper lacks it


def embedding_rows(model: Any) -> int:
    """Return the number of rows of the input embedding, also when PEFT has wrapped it."""
    embedding = model.get_input_embeddings()
    return getattr(embedding, "original_module", embedding).num_embeddings
