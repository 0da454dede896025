"""LoRA and DoRA adapters, trained embedding rows for new tokens, and the parameters that are trained."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.compat.peft import leave_casts_to_autocast
from finetune.compat.torch import fake_tensor_mode
from finetune.errors import RecipeError
from finetune.layers.experts import name_experts_for_trl, split_targets
from finetune.layers.layer_offloading import weights_for_magnitudes
from finetune.model.hybrid import layers_without_adapters
from finetune.model.language_model import outside_language_model, text_config, untrained_vision
from finetune.settings import Settings

#: Model types in which PEFT refuses adapters on two layers, with kernels or without.
_MAMBA = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"}


def attach_adapters(model: PreTrainedModel, settings: Settings, tokenizer: PreTrainedTokenizerBase | None = None) -> PeftModel:
    """Add adapters and rows of new tokens. Freeze all other parameters. Raises RecipeError for wrong `target_modules`."""
    # a model on meta needs no tokenizer
    grow_vocabulary(model, settings, tokenizer)
    targets = settings.target_modules
    layers, expert_weights = split_targets(model, targets) if isinstance(targets, list) else (targets, [])
    lora_config = LoraConfig(
        r=settings.lora_r, lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # any number scales
        lora_dropout=settings.lora_dropout, target_modules=layers, target_parameters=expert_weights or None,
        exclude_modules=_excluded_modules(model, settings.train_vision),
        trainable_token_indices=token_indices(model, settings),
        use_dora=settings.use_dora, use_rslora=settings.use_rslora, bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    for target in layers if isinstance(layers, list) else []:  # PEFT raises only when no target exists
        if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
            raise RecipeError(f"target_modules: this model has no layer {target}", _linear_layers(model))
    try:
        with warnings.catch_warnings(), weights_for_magnitudes(model):
            # PEFT looks for the ranks of experts among layers only
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            peft_model = get_peft_model(model, lora_config, low_cpu_mem_usage=next(model.parameters()).is_meta)
    except ValueError as error:
        if "use_dora" in str(error):
            raise RecipeError(f"use_dora: {error}", "PEFT has no DoRA for experts. Set use_dora=false.") from None
        raise RecipeError(f"target_modules {targets}: {error}", _linear_layers(model)) from None
    if reason := _adapted_table_problem(model):
        raise RecipeError(f"target_modules {targets}: {reason}", f"Leave it out. {_linear_layers(model)}")
    if settings.trained_embedding_rows:
        check_wrapped(model)
    if settings.activation_checkpointing is not False:
        peft_model.enable_input_require_grads()
    cast_trainable(peft_model, getattr(torch, settings.adapter_dtype))
    name_experts_for_trl(text_config(model.config))
    # not with dropout, which would draw other random numbers on CUDA, or DoRA, which would compute its norms in 16 bit
    if settings.lora_dropout == 0 and not settings.use_dora:
        leave_casts_to_autocast(peft_model)
    return peft_model


def _adapted_table_problem(model: PreTrainedModel) -> str:
    embedding: Any = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if hasattr(head, "lora_A"):
        return "the output layer can't have an adapter, because the loss is computed from its weight"
    if hasattr(embedding, "lora_A") and embedding.get_base_layer().weight is getattr(head, "weight", None):
        return "the embedding can't have an adapter, because the output layer shares its table"
    return ""


def _linear_layers(model: nn.Module) -> str:
    linear = [name.removesuffix(".base_layer") for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    # without the adapters that PEFT has added already
    names = sorted({name.rpartition(".")[2] for name in linear if "lora_" not in name})
    return f"Linear layers of this model: {', '.join(names)}"


def _excluded_modules(model: PreTrainedModel, train_vision: str) -> str | None:
    patterns = [outside_language_model(model), untrained_vision(model, train_vision)]
    excluded = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _is_special_linear(module)})
    excluded += layers_without_adapters(text_config(model.config).model_type)
    if model.config.model_type in _MAMBA:
        excluded += ["out_proj", "conv1d"]
    if excluded:
        patterns.append(rf"(.*\.)?({'|'.join(map(re.escape, excluded))})")
    return "|".join(pattern for pattern in patterns if pattern) or None


def _is_special_linear(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return False
    if type(module).__module__.startswith("bitsandbytes."):
        return False
    # a mixture's router or a grouped product, for example: recognised by an output of another type or shape than Linear's
    with fake_tensor_mode():
        fake_module = copy.copy(module)
        fake_module._parameters = {
            name: value if value is None else nn.Parameter(torch.empty(value.shape, dtype=value.dtype), False)
            for name, value in module._parameters.items()
        }
        try:
            result = fake_module(torch.empty(1, module.in_features, dtype=module.weight.dtype))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return True
        return not isinstance(result, torch.Tensor) or result.shape != (1, module.out_features)


def prepare_for_training(model: nn.Module, settings: Settings) -> None:
    """Set train mode and the adapters' dtype."""
    # TRL casts adapters of a quantised model to bf16
    cast_trainable(model, getattr(torch, settings.adapter_dtype))
    model.train()


def cast_trainable(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast trainable parameters to `dtype`."""
    for _, parameter in trainable_parameters(model):
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the name and parameter of each trainable parameter."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


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
        others = [part for part in model.modules() if isinstance(part, nn.Embedding) and part is not embedding]
        # per-layer embeddings by token, as in Gemma 3n
        if any(other.num_embeddings >= embedding.num_embeddings // 2 for other in others):
            raise RecipeError(f"new_tokens: a {model.config.model_type} model has several embedding tables")
    # a new row is the mean of the rows of its text's tokens, or of all earlier rows; a model on meta needs no tokenizer
    text_tokens = {}  # by a new token's row
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        texts = {vocabulary[name]: text for name, text in settings.new_tokens.items() if text.strip()}
        text_tokens = {row: tokenizer(text, add_special_tokens=False)["input_ids"] for row, text in texts.items()}
    weight = _grown(embedding.weight, settings, text_tokens)
    embedding.weight, embedding.num_embeddings = weight, len(weight)
    head.weight = weight if is_tied else _grown(head.weight, settings, text_tokens)
    head.out_features = len(head.weight)


def _embedding_and_head(model: Any) -> tuple[Any, Any]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_plain = isinstance(embedding, nn.Embedding) and type(head) is nn.Linear and head.bias is None
    if not is_plain:
        raise RecipeError(f"new_tokens: the rows of a {model.config.model_type} model's embedding can't be trained alone")
    return embedding, head


@torch.no_grad()
def _grown(weight: nn.Parameter, settings: Settings, text_tokens: dict[int, list[int]]) -> nn.Parameter:
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
    parameter = nn.Parameter(grown, requires_grad=False)
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
