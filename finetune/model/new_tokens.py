"""Trained embedding rows for new tokens, by PEFT's trainable tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.settings import Settings

#: End of the names of the trained rows in an adapter's file.
TRAINED_ROWS = ".token_adapter.trainable_tokens_delta"
#: Attribute of a weight: the rows that it had when it was loaded.
LOADED_ROWS = "_loaded_rows"


def grow_vocabulary(model: Any, settings: Settings, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Add the rows of new tokens to a base model. Raises RecipeError for a vocabulary that can't grow."""
    if not settings.trained_embedding_rows:
        return
    embedding, head = _tables(model)
    tied = head.weight is embedding.weight
    if settings.trained_embedding_rows[1] > embedding.num_embeddings:
        _require_one_table(model, embedding)
    # each row is the mean of the rows of its text, or of all earlier rows; on meta, without a tokenizer, rows have no values
    sources = {} if tokenizer is None else _sources(settings, tokenizer)
    weight = _grown(embedding.weight, settings, sources)
    embedding.weight, embedding.num_embeddings = weight, len(weight)
    head.weight = weight if tied else _grown(head.weight, settings, sources)
    head.out_features = len(head.weight)


def _tables(model: Any) -> tuple[Any, Any]:
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


def _sources(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> dict[int, list[int]]:
    vocabulary = tokenizer.get_vocab()
    texts = {vocabulary[name]: text for name, text in settings.new_tokens.items() if text.strip()}
    return {row: tokenizer(text, add_special_tokens=False)["input_ids"] for row, text in texts.items()}


@torch.no_grad()
def _grown(weight: torch.nn.Parameter, settings: Settings, sources: dict[int, list[int]]) -> torch.nn.Parameter:
    (first, end), (rows, width) = settings.trained_embedding_rows, weight.shape
    grown = weight.new_empty(max(rows, end), width)
    grown[:rows] = weight
    if not weight.is_meta:
        earlier_rows = min(first, rows)
        # the rows of new tokens may have been padding; the mean in fp32
        grown[min(rows, end - len(settings.new_tokens)) : end] = weight[:earlier_rows].mean(dim=0, dtype=torch.float32)
        for row, tokens in sources.items():
            if tokens := [token for token in tokens if token < earlier_rows]:
                grown[row] = weight[tokens].mean(dim=0, dtype=torch.float32)
    parameter = torch.nn.Parameter(grown, requires_grad=False)
    setattr(parameter, LOADED_ROWS, rows)
    return parameter


def token_indices(model: Any, settings: Settings) -> dict[str, list[int]] | None:
    """Return PEFT's `trainable_token_indices`: rows by table name."""
    if not settings.trained_embedding_rows:
        return None
    embedding, head = _tables(model)
    tables = [embedding] if head.weight is embedding.weight else [embedding, head]
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(table)]: list(range(*settings.trained_embedding_rows)) for table in tables}


def check_wrapped(model: Any) -> None:
    """Let TRL's loss read PEFT's wrapper of the output layer. Raises RecipeError."""
    head = model.get_output_embeddings()
    if not hasattr(head, "token_adapter"):
        raise RecipeError(f"new_tokens: PEFT does not tie the rows of a {model.config.model_type} model's output layer")
    head.bias = None  # TRL's loss reads it, and the wrapper lacks it


def embedding_rows(model: Any) -> int:
    """Return the rows of the input embedding, also when PEFT has wrapped it."""
    embedding = model.get_input_embeddings()
    return getattr(embedding, "original_module", embedding).num_embeddings
