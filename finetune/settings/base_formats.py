"""Formats of the base model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.settings.schema import Recipe

AUTO: Any = "auto"  # valid for any type until the planner has chosen


# model/build.py loads the formats, memory/rules.py has the memory of their kernels. model/adapters.py,
# memory/fake_model.py and layers/lean_layers.py recognise the layers of bitsandbytes. evaluate/quantisation.py measures each
# format, and every table of recipe/tools/ switches each off.
@dataclass(frozen=True)
class BaseFormat:
    """A format of the base weights."""

    label: str
    #: The format in a sentence.
    title: str
    bits: int
    #: Bytes of a quantised weight, with scales.
    weight_bytes: float
    #: Bytes of a weight that is not quantised.
    other_bytes: float = 2.0
    #: The recipe's switch of a quantised format.
    setting: str = ""
    #: LoRA on this format in a sentence.
    method: str = "LoRA"
    #: Whether the planner may choose the format; a recipe may always set its switch.
    planned: bool = True
    #: Whether the format quantises a mixture's fused experts.
    experts: bool = False
    #: Whether FSDP and DeepSpeed can shard the weights.
    shards: bool = True
    #: Why layers in this format can't be offloaded.
    not_offloaded: str = ""
    #: Factor on step time: how much faster the format must be to be chosen.
    price: float = 1.0
    #: Bytes read and written to turn one weight into 16 bit.
    dequantise_bytes: float = 0.0
    #: Bytes that a lean layer saves for the backward pass, per hidden element and token (dry run of Llama-3.1-8B).
    lean_saved_bytes: float = 23.1
    #: Extra bytes moved per input and output element of a linear layer.
    product_bytes: float = 0.0
    #: The planner's reason against the format.
    reason_against: str = ""


BITS_16 = BaseFormat("16 bit", "16-bit", 16, 2.0)
BITS_32 = BaseFormat("32 bit", "32-bit", 32, 4.0, other_bytes=4.0)
#: Not priced: the host waits for the GPU in every layer (outliers.any()), so launching overlaps less.
INT8 = BaseFormat(
    "int8", "int8", 8, 1.0, setting="load_in_8bit", method="LoRA on int8", shards=False, price=1.08, dequantise_bytes=3.0,
    not_offloaded="int8 layers keep copies of their weights outside the buffers",
    lean_saved_bytes=41.3,  # its adapters are not lean
    product_bytes=16.0,  # products quantise their inputs and handle outliers separately
    reason_against="NF4 is smaller and not slower in training",
)  # fmt: skip
#: Double quantisation: half a byte, a byte of scale for each 64 weights and a float for each 256 scales.
#: Dequantising takes 17.3 ms for 8B on a 4090.
NF4 = BaseFormat(
    "NF4", "4-bit NF4", 4, 0.5 + 1 / 64 + 4 / (64 * 256), setting="load_in_4bit", method="QLoRA (NF4)", experts=True,
    price=1.10, dequantise_bytes=2.52,
)  # fmt: skip

QUANTISED = (NF4, INT8)
SWITCHES = tuple(base_format.setting for base_format in QUANTISED)


def switches(base_format: BaseFormat) -> dict[str, bool]:
    """Return the settings that load the base in this format."""
    return {name: name == base_format.setting for name in SWITCHES}


def is_open(recipe: Recipe, base_format: BaseFormat) -> bool:
    """Tell whether the recipe leaves this format to the planner."""
    return getattr(recipe, base_format.setting) == AUTO
