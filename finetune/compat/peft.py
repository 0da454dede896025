"""Private names of PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from finetune.compat.patch_registry import PrivateName, replace, wrap

if TYPE_CHECKING:
    import torch

_DORA = "peft.tuners.lora.dora"
_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"
_WRAPPER = "peft.tuners.lora.layer.ParamWrapper"
_TOKENS = "peft.utils.other.TrainableTokensWrapper"
_ON_HUB = "peft.utils.save_and_load.check_file_exists_on_hf_hub"

#: Read in PEFT 0.21.2.
PRIVATE_NAMES = (
    PrivateName(f"{_DORA}.dequantize_module_weight", "patch",
                "DoRA reads dequantised weights, which a forecast lacks", f"{_DORA}.DoraLinearLayer.forward", "module"),
    PrivateName(f"{_DORA}.deepcopy", "patch", "DoRA copies the quantised layer, whose weights are on meta or fake",
                f"{_DORA}.DoraLinearLayer.update_layer"),
    PrivateName(f"{_DORA}.DoraLinearLayer.update_layer", "patch", "DoRA reads the weights of a layer that may be offloaded",
                "peft.tuners.lora.variants.DoraLinearVariant.init", "self base_layer lora_A lora_B scaling place_on_cpu"),
    PrivateName(f"{_LAYER}._cast_input_dtype", "attribute", "casts inputs to fp32, and autocast back: a second copy",
                "peft.tuners.lora.layer.Linear.forward", "self x dtype"),
    PrivateName(f"{_WRAPPER}.get_param", "patch", "4-bit experts have codes, without the weight's shape and dtype",
                f"{_WRAPPER}._get_in_out_features", "self"),
    PrivateName(f"{_WRAPPER}._activate_lora", "patch", "adds the adapter's product to the weight, which 4-bit experts lack",
                f"{_WRAPPER}.forward", "self active_adapters"),
    PrivateName(f"{_TOKENS}.bias", "attribute", "TRL's loss reads it, and the wrapper has none",
                "trl.trainer.utils.add_fused_lm_head"),
    PrivateName(_ON_HUB, "patch", "sends a request at each save, though the vocabulary never changes",
                "peft.utils.save_and_load.get_peft_model_state_dict", "repo_id filename", needs="a model of the hub"),
)  # fmt: skip


@contextmanager
def dora_weights(dequantise: Callable[[Any], Any], copy_layer: Callable[[Any], Any]) -> Iterator[None]:
    """Temporarily let DoRA read weights by `dequantise(layer)` and copy layers by `copy_layer(layer)`."""
    with replace(f"{_DORA}.dequantize_module_weight", dequantise), replace(f"{_DORA}.deepcopy", copy_layer):
        yield


def before_magnitudes(before: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Temporarily call `before(layer)` before DoRA computes magnitudes."""

    def update_after(update: Callable[..., None], self: Any, *, base_layer: Any, **kwargs: Any) -> None:
        before(base_layer)
        update(self, base_layer=base_layer, **kwargs)

    return wrap(f"{_DORA}.DoraLinearLayer.update_layer", update_after)


def save_without_vocabulary() -> None:
    """Save adapters without asking the hub for the vocabulary."""
    # PEFT would compare the vocabulary's size with the hub's, to save whole embeddings if it differs
    replace(_ON_HUB, lambda repo_id, filename, **_: False)


def leave_casts_to_autocast(model: Any) -> None:
    """Let LoRA layers cast inputs to the adapters' dtype only outside autocast."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._cast_input_dtype = _cast_outside_autocast  # type: ignore[method-assign, assignment]


def _cast_outside_autocast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import torch

    # autocast casts back to 16 bit: after PEFT's cast each layer would save a second copy of its input
    return values if torch.is_autocast_enabled(values.device.type) else values.to(dtype)


def adapt_packed_parameters(logical_weight: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let LoRA adapt 4-bit parameters, whose `lora_weights` are (A, B, scaling) of each adapter."""
    # `logical_weight` returns a tensor of the decoded weight's shape, dtype and device for a 4-bit parameter, others unchanged
    wrap(f"{_WRAPPER}.get_param", lambda get_param, self: logical_weight(get_param(self)))

    @contextmanager
    def activate_beside_weight(activate: Callable[..., Any], self: Any, active_adapters: list[str]) -> Iterator[None]:
        parameter = type(self).get_param.original_function(self)
        if logical_weight(parameter) is parameter:  # not 4-bit
            with activate(self, active_adapters):
                yield
            return
        parameter.lora_weights = [
            (self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])
            for name in active_adapters if name in self.lora_A
        ]  # fmt: skip
        try:
            yield
        finally:
            del parameter.lora_weights

    wrap(f"{_WRAPPER}._activate_lora", activate_beside_weight)
