"""Builds base model and adapters: on a device for training, on meta for the forecast."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_flash_attn_2_available

from finetune.compat.bitsandbytes import disable_cpu_repacking
from finetune.compat.peft import leave_casts_to_autocast
from finetune.compat.transformers import build_modules, loading_with, put_quantised_layers, repeat_keys
from finetune.errors import RecipeError
from finetune.model import varlen_attention
from finetune.model.configuration import read_config, resolve_model_path
from finetune.model.experts import experts_quantiser, has_experts, name_experts_for_trl, split_targets
from finetune.model.language_model import attention_by_part, model_class, outside_language_model, text_config
from finetune.model.stored import BITSANDBYTES, DEQUANTISED, give_original, stored_quantisation
from finetune.recipe.compatibility import shards_weights

if TYPE_CHECKING:
    from finetune.recipe import Recipe, Settings

__all__ = [
    "attach_adapters", "build_base", "build_on_meta", "config_from", "load_config", "model_dtype", "must_repeat_keys",
    "prepare_for_training", "quantization_config", "resolve_model_path", "restore_master_precision", "trainable_parameters",
]  # fmt: skip

#: Without these a configuration class would use another model's dimensions. `attribute_map` has their other names.
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

#: The attention of the package flash-attn, which a forecast doesn't need.
FLASH = "flash_attention_2"

#: PEFT refuses adapters on two layers of these, whose kernels read the weights themselves.
_MAMBA = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"}


def load_config(settings: Recipe) -> PretrainedConfig:
    """The model's configuration from its folder, the hub or the catalogue. Raises RecipeError."""
    return config_from(read_config(settings), settings)


def config_from(values: dict[str, Any], settings: Recipe) -> PretrainedConfig:
    """A configuration from the content of config.json.

    Raises RecipeError for an unknown model type, a model that needs remote code, or missing or impossible dimensions.
    """
    name, kind = settings.model_name_or_path, values.get("model_type")
    if not kind:
        raise RecipeError(
            f"model_name_or_path {name}: its config.json has no model_type", "Give a model of the transformers library."
        )
    if kind not in CONFIG_MAPPING:
        return _remote_config(name, kind, values, settings)
    _refuse_missing(name, values, CONFIG_MAPPING[kind])
    config_class = CONFIG_MAPPING[kind]
    settable = {key: value for key, value in values.items() if not isinstance(getattr(config_class, key, None), property)}
    try:
        # The class is used directly: `from_pretrained` would ask the hub again.
        config = config_class.from_dict({key: value for key, value in settable.items() if key != "model_type"})
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise RecipeError(f"model_name_or_path {name}: its config.json is not valid for a {kind} model: {error}") from None
    if reason := _why_no_decoder(config):
        raise RecipeError(f"model_name_or_path {name}: model_type {kind} {reason}", "Give a model that continues text.")
    return config


def _why_no_decoder(config: PretrainedConfig) -> str | None:
    """Why a configuration is not of a decoder that is trained as it will generate; None when it is."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder with a decoder"
    if hasattr(config, "is_decoder") and config.model_type not in ("gpt_neox", "gpt_neox_japanese"):
        return "is an encoder: each token sees the whole text"
    if model_class(config) is None:
        return "is not a causal language model"
    if not getattr(text_config(config), "num_hidden_layers", None):
        return "has no single stack of layers"
    return None


def build_base(
    settings: Settings, config: PretrainedConfig, *, device: str | torch.device | int, weights: bool
) -> PreTrainedModel:
    """The base model in the recipe's dtype and quantisation.

    With `weights` the safetensors files are loaded onto `device`; without, the same modules are built on `meta`.
    Raises RecipeError when the checkpoint's own quantisation and the recipe's don't agree.
    """
    quantization = quantization_config(settings, config)
    dtype, attention = model_dtype(settings), _attention(settings, weights)
    where = torch.device(device)
    if weights and where.type == "cuda" and must_repeat_keys(dtype, torch.cuda.get_device_capability(where)):
        repeat_keys()
    quantiser = _quantiser(settings, config)
    if not weights:
        return build_on_meta(
            config, quantization, dtype=dtype, attention=attention, remote_code=settings.trust_remote_code, quantiser=quantiser
        )
    if quantiser is not None and getattr(config, "quantization_config", None):
        config = _as_stored_in_16_bit(config)  # the quantiser reads the codes itself
    arguments: dict[str, Any] = {"quantization_config": quantization} if quantization is not None else {}
    with _explained(settings), loading_with(quantiser):
        loaded: Any = _class_to_build(config).from_pretrained(
            resolve_model_path(settings),
            config=config,
            revision=settings.model_revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=dtype,
            attn_implementation=attention_by_part(config, attention),
            use_safetensors=True,
            device_map={"": device},
            output_loading_info=True,
            **arguments,
        )
    model, found = loaded
    _refuse_other_weights(settings, model, found)
    model.config.use_cache = False
    return model


def _refuse_other_weights(settings: Settings, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """Raise RecipeError for missing tensors, which would be random, and for extra layers, which would be dropped."""
    missing = sorted(found["missing_keys"])
    outside = re.compile(outside_language_model(model) or "(?!)")
    unexpected = [key for key in found["unexpected_keys"] if not outside.fullmatch(key)]
    numbers = {key: re.search(r"\.(?:layers|h|blocks|block)\.(\d+)\.", key) for key in unexpected}
    layers = text_config(model.config).num_hidden_layers
    extra = sorted(key for key, number in numbers.items() if number and int(number[1]) >= layers)
    for keys, what in ((missing, "the weights lack"), (extra, f"config.json has {layers} layers, the weights have more:")):
        if keys:
            some = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise RecipeError(
                f"model_name_or_path {settings.model_name_or_path}: {what} {some}",
                "config.json and the weights are of different models, or files are missing: download the model again.",
            )


def _linear_names(model: torch.nn.Module) -> str:
    """Names of the linear layers, as `target_modules` has them; also of those already wrapped by adapters."""
    linear = [name.removesuffix(".base_layer") for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return ", ".join(sorted({name.rpartition(".")[2] for name in linear if "lora_" not in name}))


def _not_adapted(model: PreTrainedModel) -> str | None:
    """PEFT's `exclude_modules`: what is no part of the language model, and linear layers whose result isn't their product."""
    patterns = [outside_language_model(model)]
    odd = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _is_no_product(module)})
    if model.config.model_type in _MAMBA:
        odd += ["out_proj", "conv1d"]
    patterns += [rf"(.*\.)?({'|'.join(map(re.escape, odd))})"] if odd else []
    return "|".join(pattern for pattern in patterns if pattern) or None


def _is_no_product(module: torch.nn.Module) -> bool:
    """Whether a module inherits from Linear but returns something else: a mixture's router, or a product in groups."""
    if not isinstance(module, torch.nn.Linear) or type(module).forward is torch.nn.Linear.forward:
        return False
    if type(module).__module__.startswith("bitsandbytes."):
        return False
    with FakeTensorMode(allow_non_fake_inputs=True):
        inner = copy.copy(module)
        inner._parameters = {
            name: value if value is None else torch.nn.Parameter(torch.empty(value.shape, dtype=value.dtype), False)
            for name, value in module._parameters.items()
        }
        try:
            result = inner(torch.empty(1, module.in_features, dtype=module.weight.dtype))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return True
        return not isinstance(result, torch.Tensor) or result.shape != (1, module.out_features)


def attach_adapters(model: PreTrainedModel, settings: Settings) -> PeftModel:
    """Add LoRA (DoRA, rsLoRA) adapters in fp32; nothing else is trainable. Raises RecipeError for unknown `target_modules`."""
    targets = settings.target_modules
    layers, parameters = split_targets(model, targets) if isinstance(targets, list) else (targets, [])
    adapters = LoraConfig(
        r=settings.lora_r, lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # any number scales
        lora_dropout=settings.lora_dropout, target_modules=layers, target_parameters=parameters or None,
        exclude_modules=_not_adapted(model),
        use_dora=settings.use_dora, use_rslora=settings.use_rslora, bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    for target in layers if isinstance(layers, list) else []:  # PEFT is content when one of several exists
        if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
            raise RecipeError(
                f"target_modules: this model has no layer {target}", f"Linear layers of this model: {_linear_names(model)}"
            )
    try:
        with warnings.catch_warnings():
            # PEFT looks for the ranks of experts among layers only
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            peft_model = get_peft_model(model, adapters, low_cpu_mem_usage=next(model.parameters()).is_meta)
    except ValueError as error:
        if "use_dora" in str(error):
            raise RecipeError(f"use_dora: {error}", "PEFT has no DoRA for experts. Set use_dora=false.") from None
        raise RecipeError(
            f"target_modules {targets}: {error}", f"Linear layers of this model: {_linear_names(model)}"
        ) from None
    if settings.activation_checkpointing is not False:
        peft_model.enable_input_require_grads()
    restore_master_precision(peft_model)
    name_experts_for_trl(text_config(model.config))
    # Dropout in 16 bit would draw other random numbers on CUDA, DoRA would compute its norms in 16 bit: these keep PEFT's cast.
    if settings.lora_dropout == 0 and not settings.use_dora:
        leave_casts_to_autocast(peft_model)
    return peft_model


def prepare_for_training(model: torch.nn.Module, settings: Settings) -> None:
    """Set train mode, fp32 adapters, and no repacking of 4-bit weights.

    On a CPU with AVX512-BF16 the first evaluation would repack bitsandbytes' Linear4bit for inference, for good.
    """
    disable_cpu_repacking(model)
    restore_master_precision(model)
    model.train()


def restore_master_precision(model: torch.nn.Module) -> None:
    """Cast trainable parameters to fp32: TRL casts those of a quantised model to bf16, which rounds small updates away."""
    for _, parameter in trainable_parameters(model):
        if parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def trainable_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Name and parameter of each trainable parameter."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def must_repeat_keys(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether grouped-query attention needs keys and values repeated per query head at this compute capability.

    Only flash attention (16 bit, Ampere or newer) has grouped queries. Otherwise torch 2.13 would fall back to the math kernel
    with fp32 scores; with repeated keys it uses the memory-efficient kernel (sdp_utils.cpp, pytorch#191085).
    """
    return dtype == torch.float32 or capability < (8, 0)


def model_dtype(settings: Settings) -> torch.dtype:
    """The recipe's dtype as a torch.dtype."""
    return getattr(torch, settings.dtype)


def quantization_config(settings: Settings, config: PretrainedConfig) -> Any:
    """transformers' `quantization_config`: NF4 with double quantisation, int8, or None for 16 bit.

    A quantised checkpoint keeps its own configuration. Raises RecipeError where that can't be trained.
    """
    if own := stored_quantisation(vars(config), settings.model_name_or_path):
        return _own_quantization(settings, own, fused_experts=has_experts(text_config(config)))
    if settings.load_in_4bit is True:
        return _nf4(settings)
    if settings.load_in_8bit is True:
        return BitsAndBytesConfig(load_in_8bit=True)
    return None


def _nf4(settings: Settings) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=model_dtype(settings),
        # FSDP2 and ZeRO-3 shard floating-point parameters only; 4-bit weights in uint8 stay unsharded or are misread
        # (https://github.com/huggingface/accelerate/issues/3983)
        bnb_4bit_quant_storage=model_dtype(settings) if shards_weights(settings.launch) else torch.uint8,
    )


def _quantiser(settings: Settings, config: PretrainedConfig) -> type | None:
    """The quantiser of experts; None where they stay 16-bit: not 4-bit, sharded over cards, or stored by bitsandbytes."""
    own = stored_quantisation(vars(config), settings.model_name_or_path)
    stored = own.get("quant_method") == BITSANDBYTES
    packs = settings.load_in_4bit is True and not shards_weights(settings.launch) and not stored
    return experts_quantiser() if packs else None


def _as_stored_in_16_bit(config: PretrainedConfig) -> PretrainedConfig:
    return type(config).from_dict({key: value for key, value in config.to_dict().items() if key != "quantization_config"})


def _own_quantization(settings: Settings, own: dict[str, Any], *, fused_experts: bool) -> Any:
    name, method = settings.model_name_or_path, own["quant_method"]
    if method == BITSANDBYTES:
        wanted, bits = (settings.load_in_4bit, "4bit") if own.get("load_in_4bit") else (settings.load_in_8bit, "8bit")
        if wanted is not True:
            raise RecipeError(
                f"model_name_or_path {name} is stored in {bits}", f"Set load_in_{bits}=true, or {give_original(settings)}."
            )
        if fused_experts:
            raise RecipeError(
                f"model_name_or_path {name} is a mixture stored in {bits}: each expert by itself, which can't be loaded "
                "into transformers 5's fused experts",
                f"G{give_original(settings)[1:]}; load_in_4bit=true quantises its experts, too, while loading.",
            )
        if bits == "4bit" and shards_weights(settings.launch) and own.get("bnb_4bit_quant_storage", "uint8") == "uint8":
            raise RecipeError(
                f"model_name_or_path {name} is stored as 4-bit weights in uint8, which {settings.launch.strategy} can't shard",
                f"G{give_original(settings)[1:]}; load_in_4bit=true quantises it while loading, in a form that can be sharded.",
            )
        compute = {"bnb_4bit_compute_dtype": model_dtype(settings)} if bits == "4bit" else {}
        return BitsAndBytesConfig(**{**{key: value for key, value in own.items() if not key.startswith("_")}, **compute})
    if method == "mxfp4" and settings.load_in_4bit is True and not shards_weights(settings.launch):
        return _nf4(settings)
    if method in DEQUANTISED and True not in (settings.load_in_4bit, settings.load_in_8bit):
        from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

        return (Mxfp4Config if method == "mxfp4" else FineGrainedFP8Config)(dequantize=True)
    stored = method or "an unknown quantisation"
    dequantised = "Set load_in_4bit=false load_in_8bit=false to train it in 16 bit, or " if method in DEQUANTISED else ""
    advice = f"{dequantised}{give_original(settings)}; load_in_4bit=true quantises it while loading."
    raise RecipeError(
        f"model_name_or_path {name} is stored as {stored}, which does not go with this recipe's quantisation",
        advice[0].upper() + advice[1:],
    )


def build_on_meta(
    config: PretrainedConfig, quantization: Any, *, dtype: torch.dtype, attention: str | None, remote_code: bool = False,
    quantiser: type | None = None,
) -> PreTrainedModel:  # fmt: skip
    """The modules of a loaded model, on meta. transformers' own quantiser, or `quantiser`, replaces layers by bitsandbytes'."""
    bare = _as_stored_in_16_bit(config)
    with _unbuildable(config), torch.device("meta"):
        model = build_modules(_class_to_build(bare), bare, dtype, attention_by_part(bare, attention), remote_code)
    if isinstance(quantization, BitsAndBytesConfig):
        put_quantised_layers(model, quantization, dtype, quantiser)
    model.requires_grad_(False)
    model.config.use_cache = False
    return model


def _class_to_build(config: PretrainedConfig) -> Any:
    """AutoModelForCausalLM for remote code, which it finds and checks; else the class itself."""
    return AutoModelForCausalLM if hasattr(config, "auto_map") else model_class(config)


@contextmanager
def _unbuildable(config: PretrainedConfig) -> Iterator[None]:
    """Turn any error of transformers while it builds modules from a configuration into a RecipeError."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - code of hundreds of model types
        text = (str(error).strip().splitlines() or [""])[0]
        if "attention implementation" in text:
            hint = "Set attn_implementation=eager."
        elif isinstance(error, ImportError):
            hint = "Install what it needs."
        else:
            hint = "Its config.json lacks values or they don't go together; give a complete one."
        kind = "" if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: "
        raise RecipeError(f"a {config.model_type} model can't be built from this config.json: {kind}{text}", hint) from error


def _attention(settings: Settings, weights: bool) -> str:
    """The attention kernels. A forecast without flash-attn takes torch's, which save the same tensors."""
    if settings.attn_implementation == FLASH and not weights and not is_flash_attn_2_available():
        if not settings.packing:
            return "sdpa"
        varlen_attention.register()
        return varlen_attention.NAME
    if settings.attn_implementation == varlen_attention.NAME:
        varlen_attention.register()
    return settings.attn_implementation


@contextmanager
def _explained(settings: Settings) -> Iterator[None]:
    """Turn errors of transformers and the hub about a model that can't be built into a RecipeError."""
    name = settings.model_name_or_path
    try:
        yield
    except (ValueError, ImportError) as error:
        hint = "Set attn_implementation=eager." if "attention implementation" in str(error) else ""
        raise RecipeError(f"model_name_or_path {name}: {str(error).splitlines()[0]}", hint) from None
    except (SafetensorError, KeyError, AttributeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "mismatch" not in str(error):
            raise  # out of memory, among others
        raise RecipeError(
            f"model_name_or_path {name}: its weights can't be loaded: {type(error).__name__}: {str(error).splitlines()[0]}",
            "config.json and the weights are of different models, or a file is damaged: download the model again.",
        ) from error
    except OSError as error:
        hint = "The weights must be safetensors files, present or reachable on the hub (gated models: `hf auth login`)."
        raise RecipeError(f"model_name_or_path {name}: {str(error).splitlines()[0]}", hint) from None


def _remote_config(name: str, kind: str, values: dict[str, Any], settings: Recipe) -> PretrainedConfig:
    if "auto_map" not in values:
        raise RecipeError(
            f"model_name_or_path {name}: transformers does not know model_type {kind!r}", "Give another base model."
        )
    if not settings.trust_remote_code:
        raise RecipeError(
            f"model_name_or_path {name}: model_type {kind!r} needs code from the model's repository, which is not run",
            "Read that code, then set trust_remote_code=true and model_revision to its full commit.",
        )
    path = resolve_model_path(settings)
    return AutoConfig.from_pretrained(path, revision=settings.model_revision, trust_remote_code=True)


def _refuse_missing(name: str, values: dict[str, Any], config_class: type[PretrainedConfig]) -> None:
    text = next((values[key] for key in ("text_config", "llm_config") if isinstance(values.get(key), dict)), None)
    given = values if text is None else text
    names = config_class.attribute_map
    if text is None:
        needed = [key for key in _NEEDED if hasattr(config_class, names.get(key, key))]  # Mamba has no heads
    else:
        needed = list(_NEEDED[:2])  # multimodal files leave the rest to the text model's class
    needed = [key for key in needed if not isinstance(getattr(config_class, key, None), property)]  # derived from others
    problems = []
    for key in needed:
        value = next((given[other] for other in (key, names.get(key, key)) if other in given), None)
        if value is None:
            problems.append(f"model_name_or_path {name}: its config.json has no {key}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(
                f"model_name_or_path {name}: {key} is {value!r} in its config.json; it should be a whole number above 0"
            )
    if problems:
        raise RecipeError(problems, "Give a complete config.json; the model's size depends on these values.")
