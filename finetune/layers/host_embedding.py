"""The input embedding's table in host memory."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from finetune.errors import RecipeError
from finetune.layers import host_memory
from finetune.layers.checkpointing import base_of


def offloadable_embedding(model: torch.nn.Module) -> torch.nn.Embedding | None:
    """Return the input embedding if its table is frozen and not shared with the output layer, else None."""
    base = base_of(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if type(embedding) is not torch.nn.Embedding or embedding.max_norm is not None or embedding.weight.requires_grad:
        return None
    return None if head is not None and head.weight is embedding.weight else embedding


def offload_embedding(model: torch.nn.Module) -> None:
    """Move the input embedding's table to host memory for good. Raises RecipeError if it is trained or shared."""
    embedding: Any = base_of(model).get_input_embeddings()
    if "weight" not in getattr(embedding, "_parameters", {}) and hasattr(embedding, "weight"):
        return  # already in host memory
    embedding = offloadable_embedding(model)
    if embedding is None:
        raise RecipeError(
            "offload_embeddings: this model's input embedding is trained, or shared with the output layer",
            "Set offload_embeddings=false.",
        )
    # no longer a parameter, so that the table stays in host memory when the model is moved, and out of checkpoints
    weight = embedding._parameters.pop("weight").detach()
    table = host_memory.host_empty(weight, pinned=False)
    table.copy_(weight)
    embedding.weight, embedding.forward = table, MethodType(_look_up, embedding)


def _look_up(self: Any, ids: torch.Tensor) -> torch.Tensor:
    embeddings = torch.empty((*ids.shape, self.embedding_dim), dtype=self.weight.dtype, device=ids.device)
    # pinned, so that the copy overlaps with computation
    pinned = ids.is_cuda and not host_memory.is_in_forecast(ids)
    rows, host_ids = host_memory.host_empty(embeddings, pinned=pinned), host_memory.host_empty(ids, pinned=False)
    host_ids.copy_(ids)
    torch.index_select(self.weight, 0, host_ids.view(-1), out=rows.view(-1, self.embedding_dim))
    return embeddings.copy_(rows, non_blocking=True)
