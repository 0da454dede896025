"""Patches of transformers, as of 5.23.0."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from inspect import getclosurevars
from typing import Any

from finetune.compat import replace, wrap

_EXPERTS = "transformers.integrations.moe._can_use_grouped_mm"


def trainers_optimizer(name: str, learning_rate: float) -> tuple[type, dict[str, Any]]:
    """Return Trainer's optimizer class and arguments for `optim=name`."""
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext
    from transformers.training_args import OptimizerNames, TrainingArguments

    args = object.__new__(TrainingArguments)  # the fields' defaults, without the checks that set up a device
    args.optim = OptimizerNames(name)
    adam_kwargs = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return _OPTIMIZER_HANDLERS[args.optim](OptimizerContext(args, None, {"lr": learning_rate}, adam_kwargs, {}))


@contextmanager
def _temporary_entries(mapping: MutableMapping[str, Any], **entries: Any) -> Iterator[None]:
    before = {name: mapping[name] for name in entries if name in mapping}
    mapping.update(entries)
    try:
        yield
    finally:
        for name in entries:
            del mapping[name]
        mapping.update(before)


def keys_repeated() -> AbstractContextManager[Any]:
    """Repeat keys and values for each query head until the process ends, or in a `with` block."""
    # without flash attention, torch's grouped queries compute all scores in fp32
    return replace("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", lambda *_: False)


def without_packing_detection() -> AbstractContextManager[Any]:
    """Temporarily treat all rows as unpacked."""
    # transformers would read the position ids to find out, once for each kind of mask
    return replace("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)


def auxiliary_loss(around: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Temporarily wrap the router's auxiliary loss."""
    return wrap("transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func", around)


def fake_experts() -> AbstractContextManager[Any]:
    """Temporarily run experts on fake tensors of any dtype."""
    import torch

    # torch's grouped matmul has a fake form for bf16 only; the fallback allocates the same
    return wrap(_EXPERTS, lambda can_use, input, weight, offs: weight.dtype == torch.bfloat16 and can_use(input, weight, offs))


def replace_with_quantised_layers(model: Any, quantization: Any, dtype: Any, quantiser: type | None = None) -> None:
    """Replace linear layers by bitsandbytes', without reading weights."""
    from transformers.modeling_utils import local_torch_dtype
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    method = "bitsandbytes_4bit" if quantization.load_in_4bit else "bitsandbytes_8bit"
    # replaces layers as from_pretrained does with this configuration
    quantizer = (quantiser or AUTO_QUANTIZER_MAPPING[method])(quantization, pre_quantized=False)
    with local_torch_dtype(dtype):  # the dtype of biases, as in from_pretrained
        quantizer.preprocess_model(model, dtype=dtype, device_map=None)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


@contextmanager
def sequential_loading(on_loaded: Callable[[Any, Any, str], None]) -> Iterator[None]:
    """Temporarily load weights one by one, calling `on_loaded(model, module, name)` after each."""

    def set_and_notify(set_param: Callable[..., None], model: Any, target_name: str, *args: Any, **kwargs: Any) -> None:
        set_param(model, target_name, *args, **kwargs)
        path, _, name = target_name.rpartition(".")
        on_loaded(model, model.get_submodule(path), name)

    with (
        # no threads that read ahead, and no allocator warm-up: it allocates the whole model, which may not fit
        _temporary_entries(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"),
        wrap("transformers.core_model_loading.set_param_for_module", set_and_notify),
        replace("transformers.modeling_utils.caching_allocator_warmup", lambda *_: None),
    ):
        yield


def name_in_checkpoint(model: Any) -> Callable[[str], str]:
    """Return a function from a module's path to its checkpoint name."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    # a fused weight gets its first part's name
    patterns = {entry.target_patterns[0]: min(entry.source_patterns) for entry in get_model_conversion_mapping(model)}
    names = {target: re.sub(r"[\\^]", "", source).replace("*", "0") for target, source in patterns.items()}
    suffixes = {target: source for target, source in names.items() if "experts" in target}
    # modules on the first level that have another name in the checkpoint
    prefixes = {target: source for target, source in names.items() if re.fullmatch(r"\w+\.:\w+\.", f"{target}:{source}")}

    def name_of(path: str) -> str:
        prefix = path.partition(".")[0] + "."
        path = prefixes[prefix] + path.removeprefix(prefix) if prefix in prefixes else path
        suffix = next((suffix for suffix in suffixes if path.endswith(suffix)), "")
        return path.removesuffix(suffix) + suffixes.get(suffix, "")

    return name_of


def loading_with(quantiser: type | None) -> AbstractContextManager[Any]:
    """Temporarily load 4-bit models with `quantiser`, if given."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    return _temporary_entries(AUTO_QUANTIZER_MAPPING, bitsandbytes_4bit=quantiser) if quantiser else nullcontext()


def quantised_on(device: Any) -> AbstractContextManager[Any]:
    """Temporarily quantise weights in host memory on `device`."""
    if device.type == "cpu":
        return nullcontext()

    def convert(original: Callable[..., Any], self: Any, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        quantised = original(self, _cast_or_move(input_dict, device), *args, **kwargs)
        return {name: value.to("cpu") for name, value in quantised.items()}

    return wrap("transformers.integrations.bitsandbytes.Bnb4bitQuantize.convert", convert)


def _cast_or_move(inputs: dict[str, Any], to: Any) -> dict[str, Any]:
    # an input is a tensor or a list with one tensor
    return {name: (value[0] if isinstance(value, list) else value).to(to) for name, value in inputs.items()}


@cache
def packing_quantiser(pack: Callable[[Any, Any, list[str]], None]) -> type:
    """Return a 4-bit quantiser that also packs experts by `pack(model, config, excluded_modules)`."""
    import torch
    from bitsandbytes.nn import Params4bit
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.integrations.mxfp4 import Mxfp4Dequantize
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name

    class Mxfp4Codes(Mxfp4Dequantize):
        def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            # transformers has cast the codes to the weights' dtype
            return super().convert(_cast_or_move(input_dict, torch.uint8), *args, **kwargs)

    class QuantiseOnCard(Bnb4bitQuantize):
        def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().convert(_cast_or_move(input_dict, self.hf_quantizer.device), *args, **kwargs)

    class PackingQuantizer(Bnb4BitHfQuantizer):
        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            module, name = get_module_from_name(model, param_name)
            return isinstance(module._parameters.get(name), Params4bit)

        def _process_model_before_weight_loading(self, model: Any, device_map: Any = None, **kwargs: Any) -> None:
            super()._process_model_before_weight_loading(model, device_map, **kwargs)
            self.device = torch.device((device_map or {}).get("", "cpu"))
            pack(model, self.quantization_config, self.modules_to_not_convert)

        def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
            for converter in weight_conversions:
                if isinstance(converter, WeightConverter):
                    # a layer's experts are merged, and dequantised from mxfp4, in host memory, then quantised on the GPU
                    converter.force_cpu = True
            mxfp4_converters = [
                WeightConverter([f"{name}_blocks", f"{name}_scales"], name, [Mxfp4Codes(self)], force_cpu=True)
                for name in ("gate_up_proj", "down_proj")
            ]
            return super().update_weight_conversions(weight_conversions, model) + mxfp4_converters

        def get_quantize_ops(self) -> Any:
            return QuantiseOnCard(self)

    return PackingQuantizer


def replace_grouped_linear(function: Callable[..., Any]) -> None:
    """Multiply experts by `function`, or as usual where it returns None."""

    def linear(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        product = function(*args, **kwargs)
        return original(*args, **kwargs) if product is None else product

    wrap("transformers.integrations.moe._grouped_linear", linear)


def apply_gate(experts: Any, gate_up: Any) -> Any:
    """Apply the experts' gate or activation to their first product."""
    return experts._apply_gate(gate_up) if experts.has_gate else experts.act_fn(gate_up)


def wrap_checkpoint(module: Any, wrapper_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a module's checkpoint function, if any, by `wrapper_of(function)`."""
    if hasattr(module, "_gradient_checkpointing_func"):
        module._gradient_checkpointing_func = wrapper_of(module._gradient_checkpointing_func)


def without_session_id() -> None:
    """Send only transformers' version as user agent."""
    from transformers import __version__

    # it sends a random session id even if telemetry is off
    replace("transformers.utils.hub.http_user_agent", lambda user_agent=None: f"transformers/{__version__}; telemetry/off")


def layer_kernels(model: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield path, function and closure of each function with optional kernels in the model's code."""
    for module_name in {type(module).__module__ for module in model.modules()}:
        for name, value in list(vars(sys.modules[module_name]).items()):
            function = getattr(value, "original_function", value)
            # a variable of transformers' decorator use_kernel_func_from_hub_with_fallback
            if "is_new_implementation" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
                yield f"{module_name}.{name}", function, dict(getclosurevars(function).nonlocals)


@contextmanager
def replaced_kernels(model: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Temporarily run `call(function, closure, *args)` instead of `layer_kernels`."""
    with ExitStack() as stack:
        for path, function, closure in layer_kernels(model):
            stack.enter_context(replace(path, partial(call, function, closure)))
        yield


def kernels_by_device(model: Any, falls_back_to_torch: Callable[[str, tuple[int, int] | None], bool]) -> None:
    """Let `model` run the reference instead of kernels where `falls_back_to_torch(package, compute capability)`."""
    import torch

    def choose(package: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        # None on the CPU
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        is_packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        if falls_back_to_torch(package, capability) and not is_packed:  # the reference would mix packed rows
            return kernel.__wrapped__(*args, **kwargs)
        return kernel(*args, **kwargs)

    for path, _, closure in layer_kernels(model):
        if closure["is_new_implementation"]:
            wrap(path, partial(choose, closure["package"]))


def quiet_libraries() -> None:
    """Hide progress bars, FutureWarnings and bitsandbytes' warnings in this process."""
    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)
    # it suggests a kernel for CPUs at each start, and says at each layer and step that int8 casts bf16 inputs
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
