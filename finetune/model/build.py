"""The base model: its dtype and quantisation; loaded onto a device or as a rank's rows, built on meta for the forecast."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from finetune.compat.accelerate import shard_with
from finetune.compat.bitsandbytes import without_cpu_repacking
from finetune.compat.transformers import (
    kernels_by_device,
    keys_repeated,
    loading_with,
    packing_quantiser,
    quantised_on,
    replace_with_quantised_layers,
    sequential_loading,
)
from finetune.data.report import first_line
from finetune.errors import RecipeError
from finetune.layers import varlen_attention
from finetune.layers.experts import has_experts, pack_experts
from finetune.layers.layer_offloading import LayerOffloading, offload_while_loading
from finetune.model.configuration import BITSANDBYTES, DEQUANTISED, resolve_model_path, stored_format, stored_quantisation
from finetune.model.hybrid import falls_back_to_torch, layers_kept_in_16_bit
from finetune.model.language_model import attention_by_part, model_class, outside_language_model, text_config
from finetune.model.weights import check_weights
from finetune.settings import Settings
from finetune.settings.base_formats import INT8, NF4
from finetune.settings.compatibility import loads_own_rows
from finetune.system import return_freed_memory


def model_dtype(settings: Settings) -> torch.dtype:
    """Return the recipe's dtype."""
    return getattr(torch, settings.dtype)


def quantization_config(settings: Settings, config: PretrainedConfig) -> Any:
    """Return transformers' `quantization_config`, or None if unquantised. Raises RecipeError for an untrainable checkpoint."""
    if stored := stored_quantisation(vars(config), settings.model_name_or_path):
        return _config_for_stored(settings, stored, has_experts=has_experts(text_config(config)))
    base_format = settings.base_format
    if base_format not in (NF4, INT8):
        return None
    quantization = _nf4_config(settings) if base_format is NF4 else BitsAndBytesConfig(load_in_8bit=True)
    if names := layers_kept_in_16_bit(text_config(config).model_type):
        quantization.llm_int8_skip_modules = [*names, "lm_head"]  # bitsandbytes reads this setting for 4 bits, too
    return quantization


def _nf4_config(settings: Settings) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=model_dtype(settings),
        # FSDP2 and ZeRO-3 shard floating-point parameters only; 4-bit weights in uint8 stay unsharded or are misread
        # (https://github.com/huggingface/accelerate/issues/3983)
        bnb_4bit_quant_storage=model_dtype(settings) if settings.launch.shards_weights else torch.uint8,
    )


def quantiser_of(settings: Settings, config: PretrainedConfig) -> type | None:
    """Return the quantiser class that packs experts, or None if experts stay 16-bit."""
    stored = stored_quantisation(vars(config), settings.model_name_or_path)
    # a checkpoint that bitsandbytes stored has separate experts; FSDP2 and ZeRO-3 shard floating-point parameters only
    is_excluded = stored.get("quant_method") == BITSANDBYTES or settings.launch.shards_weights
    return packing_quantiser(pack_experts) if settings.base_format.experts and not is_excluded else None


def _config_for_stored(settings: Settings, stored: dict[str, Any], *, has_experts: bool) -> Any:
    name, method = settings.model_name_or_path, stored["quant_method"]
    if method == BITSANDBYTES:
        stored_in = stored_format(stored)
        bits = f"{stored_in.bits}bit"
        if settings.base_format is not stored_in:
            raise RecipeError(
                f"model_name_or_path {name} is stored in {bits}",
                f"Set {stored_in.setting}=true, or give the 16-bit model.",
            )
        # transformers 5 fuses a mixture's experts into 3-D weights
        if has_experts:
            raise RecipeError(
                f"model_name_or_path {name} is a mixture stored in {bits} with separate experts; transformers 5 "
                "loads fused experts only",
                "Give the 16-bit model; load_in_4bit=true also quantises its experts while loading.",
            )
        if stored_in is NF4 and settings.launch.shards_weights and stored.get("bnb_4bit_quant_storage", "uint8") == "uint8":
            raise RecipeError(
                f"model_name_or_path {name} is stored as 4-bit weights in uint8, which {settings.launch.strategy} can't shard",
                "Give the 16-bit model; load_in_4bit=true quantises it while loading, so that it can be sharded.",
            )
        arguments = {key: value for key, value in stored.items() if not key.startswith("_")}
        if stored_in is NF4:
            arguments["bnb_4bit_compute_dtype"] = model_dtype(settings)
        return BitsAndBytesConfig(**arguments)
    if method == "mxfp4" and settings.base_format is NF4 and not settings.launch.shards_weights:
        return _nf4_config(settings)
    if method in DEQUANTISED and not settings.requested_formats:
        return (Mxfp4Config if method == "mxfp4" else FineGrainedFP8Config)(dequantize=True)
    quantisation = method or "an unknown quantisation"
    give = "Set load_in_4bit=false load_in_8bit=false to train it in 16 bit, or give" if method in DEQUANTISED else "Give"
    raise RecipeError(
        f"model_name_or_path {name} is stored as {quantisation}, which conflicts with this recipe's quantisation",
        f"{give} the 16-bit model; load_in_4bit=true quantises it while loading.",
    )


#: Errors that transformers' code raises for wrong values of a configuration.
_CODE_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError)
#: Texts in torch's RuntimeErrors about a model's files.
_FILE_ERROR_TEXTS = ("mismatch", "cannot be converted", "negative dimension", "infer dtype")


def build_base(
    settings: Settings, config: PretrainedConfig, *, device: str | torch.device | int, weights: bool, offloads: bool = False
) -> PreTrainedModel:
    """Return the base model in the recipe's dtype and quantisation, on meta without `weights`.

    Raises RecipeError when the quantisation of the checkpoint contradicts the recipe.
    """
    # a decoder layer leaves the device once it is loaded, and returns only to run
    offloads = offloads and settings.layer_offloading is not False
    quantization = quantization_config(settings, config)
    dtype, attention = model_dtype(settings), _attention(settings, weights)
    torch_device = torch.device(device)
    if weights and torch_device.type == "cuda" and must_repeat_keys(dtype, varlen_attention.compute_capability(torch_device)):
        keys_repeated()  # for the rest of the process
    quantiser = quantiser_of(settings, config)
    if not weights:
        model: Any = build_on_meta(config, quantization, dtype=dtype, attention=attention, quantiser=quantiser)
        if offloads:
            model.layer_offloading = LayerOffloading(model, settings, weights=False)
        return model
    if quantiser is not None and getattr(config, "quantization_config", None):
        config = _without_quantization(config)  # the quantiser reads the codes itself
    path = resolve_model_path(settings)
    offloading: Any = offload_while_loading(settings) if offloads else nullcontext()
    with load_errors(path), loading_with(quantiser), without_cpu_repacking(), offloading:
        model, loading_info = _class_to_build(config).from_pretrained(
            path,
            config=config,
            revision=settings.model_revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=dtype,
            attn_implementation=attention_by_part(config, attention),
            use_safetensors=True,
            device_map={"": device},
            output_loading_info=True,
            quantization_config=quantization,
        )
    _check_weights_match(settings, model, loading_info)
    if offloads:
        model.layer_offloading.finish()
    model.config.use_cache = False
    kernels_by_device(model, falls_back_to_torch)
    return model


def _check_weights_match(settings: Settings, model: PreTrainedModel, loading_info: dict[str, Any]) -> None:
    # missing tensors would be random, and extra layers would be dropped
    missing = sorted(loading_info["missing_keys"])
    outside = re.compile(outside_language_model(model) or "(?!)")
    unexpected = [key for key in loading_info["unexpected_keys"] if not outside.fullmatch(key)]
    matches = {key: re.search(r"\.(?:layers|h|blocks|block)\.(\d+)\.", key) for key in unexpected}
    layers = text_config(model.config).num_hidden_layers
    extra = sorted(key for key, match in matches.items() if match and int(match[1]) >= layers)
    for keys, problem in ((missing, "the weights lack"), (extra, f"config.json has {layers} layers, the weights have more:")):
        if keys:
            listed = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise RecipeError(
                f"model_name_or_path {settings.model_name_or_path}: {problem} {listed}",
                "config.json and the weights belong to different models, or files are missing. Download the model again.",
            )


def must_repeat_keys(dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Return whether grouped-query attention needs keys and values repeated for each query head on this GPU."""
    # Only flash attention (16 bit, Ampere or newer) has grouped queries. Otherwise torch 2.13 would fall back to the math
    # kernel with fp32 scores; with repeated keys it uses the memory-efficient kernel (sdp_utils.cpp, pytorch#191085).
    return dtype == torch.float32 or (capability is not None and capability < (8, 0))


def _without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    return type(config).from_dict({key: value for key, value in config.to_dict().items() if key != "quantization_config"})


def build_on_meta(
    config: PretrainedConfig, quantization: Any, *, dtype: torch.dtype, attention: str | None, quantiser: type | None = None
) -> PreTrainedModel:
    """Return the modules of a loaded model on meta, with bitsandbytes' layers."""
    plain_config = _without_quantization(config)
    try:
        with torch.device("meta"):
            arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention_by_part(plain_config, attention)}
            class_to_build = _class_to_build(plain_config)
            if class_to_build is AutoModelForCausalLM:
                # with `auto_map`, which `config_from` keeps in trusted configurations only
                model = class_to_build.from_config(plain_config, trust_remote_code=True, **arguments)
            else:
                model = class_to_build._from_config(plain_config, **arguments)
    except Exception as error:  # noqa: BLE001 - code of hundreds of model types
        text = first_line(error)
        if "attention implementation" in text:
            hint = "Set attn_implementation=eager."
        elif isinstance(error, ImportError):
            hint = "Install what it needs."
        else:
            hint = "Its config.json lacks values or they don't go together; give a complete one."
        text = text if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {text}"
        raise RecipeError(f"a {config.model_type} model can't be built from this config.json: {text}", hint) from error
    if isinstance(quantization, BitsAndBytesConfig):
        with without_cpu_repacking():
            replace_with_quantised_layers(model, quantization, dtype, quantiser)
    model.requires_grad_(False)
    model.config.use_cache = False
    kernels_by_device(model, falls_back_to_torch)
    return model


def _attention(settings: Settings, weights: bool) -> str:
    attention: str = settings.attn_implementation
    # a forecast on a machine without flash-attn takes torch's kernels, which save the same tensors
    if attention == "flash_attention_2" and not weights and not is_flash_attn_2_available():
        attention = varlen_attention.NAME if settings.packing else "sdpa"
    if attention == varlen_attention.NAME:
        varlen_attention.register()
    return attention


def _class_to_build(config: PretrainedConfig) -> Any:
    # AutoModelForCausalLM finds and checks remote code
    return AutoModelForCausalLM if hasattr(config, "auto_map") else model_class(config)


@contextmanager
def load_errors(path: str) -> Iterator[None]:
    """Turn errors about a model's files into a RecipeError that names the damaged file."""
    try:
        yield
    except (*_CODE_ERRORS, SafetensorError, OSError, RuntimeError) as error:
        # RecursionError, a RuntimeError: a header that is nested too deeply
        is_file_error = isinstance(error, RecursionError) or any(text in str(error) for text in _FILE_ERROR_TEXTS)
        if isinstance(error, RuntimeError) and not is_file_error:
            raise  # out of memory, among others
        if Path(path).is_dir():
            check_weights(Path(path))
        problem, fix = first_line(error), ""
        if isinstance(error, OSError):
            fix = "The weights must be safetensors files, present or reachable on the hub (gated models: `hf auth login`)."
        elif "attention implementation" in problem:
            fix = "Set attn_implementation=eager."
        elif not isinstance(error, (ValueError, ImportError)):
            problem = f"its configurations or weights can't be loaded: {type(error).__name__}: {problem}"
            fix = "They belong to different models, or a file is damaged. Download the model again."
        raise RecipeError(f"model_name_or_path {path}: {problem}", fix) from error


#: The modules that use a parameter, and the parameter's name in each. Tied parameters have several.
Uses = list[tuple[nn.Module, str]]


def load_base(settings: Settings, config: PretrainedConfig, device: torch.device | str | int, rank: int) -> PreTrainedModel:
    """Return the base model on `device`, with this rank's rows only where the settings allow it."""
    if loads_own_rows(settings):
        return _load_own_rows(settings, config, device, rank)
    return build_base(settings, config, device=device, weights=True, offloads=True)


def _load_own_rows(
    settings: Settings, config: PretrainedConfig, device: torch.device | str | int, rank: int
) -> PreTrainedModel:
    rows_device = "cpu" if settings.launch.offload == "cpu" else device

    def drop_other_rows(parameter: Any) -> None:
        # split as by torch.chunk: the last ranks may get fewer rows, or none
        count = -(-len(parameter) // settings.launch.num_processes)
        parameter.own_rows = parameter.data[rank * count : (rank + 1) * count].to(rows_device, copy=True)
        # until `_shard`, one element expanded to the shape: PEFT, TRL and accelerate read shape, dtype and device
        parameter.data = torch.empty(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
        if (state := getattr(parameter, "quant_state", None)) is not None:
            state.to(device)  # not a parameter: every rank has the whole tables

    def on_loaded(model: Any, module: nn.Module, name: str) -> None:
        parameter = module._parameters.get(name)
        tied = [model.get_parameter_or_buffer(path) for pair in model.all_tied_weights_keys.items() for path in pair]
        # transformers compares the values of tied weights once all are loaded
        if parameter is not None and all(parameter is not other for other in tied):
            drop_other_rows(parameter)
        return_freed_memory()  # quantisation on a CPU takes 14 bytes for each element of a matrix

    # no process ever holds the whole model: each weight loses the other ranks' rows when it is loaded
    with quantised_on(torch.device(device)), sequential_loading(on_loaded):
        base = build_base(settings, config, device="cpu", weights=True)
    uses: dict[Any, Uses] = {}
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((module, name))
        for tensors in (module._buffers, vars(module)):
            tensors.update({name: value.to(device) for name, value in tensors.items() if isinstance(value, torch.Tensor)})
    for parameter in uses:
        if not hasattr(parameter, "own_rows"):
            drop_other_rows(parameter)
    base.hf_device_map = {"": device}  # type: ignore[assignment]  # accelerate compares it with the rank's device
    shard_with(partial(_shard, uses))
    return base


def _shard(uses: dict[Any, Uses], shard_default: Callable[[Any, Any], Any], accelerator: Any, model: Any) -> Any:
    """Shard `model` with accelerate's function while its frozen parameters are on meta, then set this rank's rows."""
    from torch.distributed.tensor import DTensor, Shard

    for parameter, places in uses.items():
        _set_parameter(places, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    prepared = shard_default(accelerator, model)
    for parameter, places in uses.items():
        module, name = places[0]
        empty: Any = module._parameters[name]
        assert isinstance(empty, DTensor) and tuple(empty.placements) == (Shard(0),)
        rows = DTensor.from_local(
            parameter.own_rows, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
        )
        _set_parameter(places, rows)
        if (state := getattr(parameter, "quant_state", None)) is not None:
            module.quant_state = state
    return prepared


def _set_parameter(places: Uses, data: torch.Tensor) -> None:
    parameter = nn.Parameter(data, requires_grad=False)
    for module, name in places:
        module._parameters[name] = parameter
