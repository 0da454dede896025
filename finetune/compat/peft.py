"""Undocumented names of PEFT that are patched or set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from finetune.compat.patch_registry import PrivateName, replace, replaced

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
                "DoRA reads the dequantised weights, which a forecast does not have", f"{_DORA}.DoraLinearLayer.forward",
                "module"),
    PrivateName(f"{_DORA}.deepcopy", "patch", "DoRA copies the quantised layer, whose weights are on meta or fake",
                f"{_DORA}.DoraLinearLayer.update_layer"),
    PrivateName(f"{_DORA}.DoraLinearLayer.update_layer", "patch",
                "DoRA reads the weights of a layer that may have left the card",
                "peft.tuners.lora.variants.DoraLinearVariant.init", "self base_layer lora_A lora_B scaling place_on_cpu"),
    PrivateName(f"{_LAYER}._cast_input_dtype", "attribute",
                "casts every input to fp32, which autocast casts back, to a second copy",
                "peft.tuners.lora.layer.Linear.forward", "self x dtype"),
    PrivateName(f"{_WRAPPER}.get_param", "patch", "of 4-bit experts it would see codes in place of a weight's shape and dtype",
                f"{_WRAPPER}._get_in_out_features", "self"),
    PrivateName(f"{_WRAPPER}._activate_lora", "patch",
                "it adds the adapter's product to the weight; that of 4-bit experts is codes", f"{_WRAPPER}.forward",
                "self active_adapters"),
    PrivateName(f"{_TOKENS}.bias", "attribute",
                "of an output layer with trained rows TRL's loss reads the bias, which it lacks",
                "trl.trainer.utils.add_fused_lm_head"),
    PrivateName(_ON_HUB, "patch",
                "asked at each save whether the vocabulary has changed, which it never does: a request, or a warning",
                "peft.utils.save_and_load.get_peft_model_state_dict", "repo_id filename kwargs", needs="a model of the hub"),
)  # fmt: skip


@contextmanager
def dora_weights(dequantised: Callable[[Any], Any], copied: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, DoRA gets the weights of a layer from `dequantised(layer)`, and a copy of a 4-bit layer from `copied(layer)`."""
    with replaced(f"{_DORA}.dequantize_module_weight", dequantised), replaced(f"{_DORA}.deepcopy", copied):
        yield


@contextmanager
def before_magnitudes(before: Callable[[Any], None]) -> Iterator[None]:
    """Inside, `before(layer)` is called before DoRA computes its magnitudes from the weights of a layer."""
    from peft.tuners.lora.dora import DoraLinearLayer

    update = DoraLinearLayer.update_layer

    def updated(self: Any, *, base_layer: Any, **named: Any) -> None:
        before(base_layer)
        update(self, base_layer=base_layer, **named)

    with replaced(f"{_DORA}.DoraLinearLayer.update_layer", updated):
        yield


def save_without_vocabulary() -> None:
    """Save adapters without asking the hub for the base model's vocabulary from now on: training never changes it."""
    replace(_ON_HUB, lambda repo_id, filename, **_: False)


def give_wrapper_no_bias(wrapper: Any) -> None:
    """Let an output layer some of whose rows are trained say that it has no bias."""
    wrapper.bias = None


def leave_casts_to_autocast(model: Any) -> None:
    """Make LoRA layers cast their inputs to the adapters' dtype only outside autocast.

    Autocast computes in 16 bit whatever PEFT has cast: with PEFT's cast, each layer keeps a 16-bit copy of its input for
    backward, equal to the input that the base layer keeps.
    """
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._cast_input_dtype = _cast_outside_autocast  # type: ignore[method-assign, assignment]


def _cast_outside_autocast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return values if torch.is_autocast_enabled(values.device.type) else values.to(dtype)


def adapt_packed_parameters(logical: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let LoRA adapt parameters that are stored as 4-bit codes, from now on.

    `logical(parameter)` has the shape, dtype and device of the weight that the codes encode, or is the parameter itself.
    During a forward, the parameter's `lora_weights` has (A, B, scaling) of each active adapter.
    """
    from peft.tuners.lora.layer import ParamWrapper

    get_param, activate = ParamWrapper.get_param, ParamWrapper._activate_lora
    if getattr(get_param, "logical", None) is logical:
        return

    def get_logical(self: Any) -> torch.Tensor:
        return logical(get_param(self))

    @contextmanager
    def activate_beside(self: Any, active_adapters: list[str]) -> Iterator[None]:
        parameter = get_param(self)
        if logical(parameter) is parameter:
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

    get_logical.logical = logical  # type: ignore[attr-defined]
    replace(f"{_WRAPPER}.get_param", get_logical)
    replace(f"{_WRAPPER}._activate_lora", activate_beside)
