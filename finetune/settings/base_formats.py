"""The formats of the base model's weights: a row for each, with the facts that validation, forecast and planner need.

finetune/model/quantisation.py has how a format is loaded, finetune/memory/rules.py the memory of its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.settings.schema import Recipe


@dataclass(frozen=True)
class BaseFormat:
    """`bits` and `weight_bytes` (with scales): of a quantised weight; `other_bytes`: of a weight that is not quantised.

    `setting`: the recipe's switch of a quantised format. `title` and `method`: the format, and LoRA on it, in a sentence.
    """

    label: str
    title: str
    bits: int
    weight_bytes: float
    other_bytes: float = 2.0
    setting: str = ""
    method: str = "LoRA"
    #: Whether the planner chooses it; others have to be asked for.
    planned: bool = True
    #: Whether it quantises a mixture's fused experts, too.
    experts: bool = False
    #: Whether FSDP and DeepSpeed can shard it.
    shards: bool = True
    #: Whether quantised layers are kept in a file, from which later starts read them.
    quantised_file: bool = False
    #: Why its layers can't be offloaded.
    not_offloaded: str = ""
    #: Factor on step time: how much faster it must be before it is chosen.
    price: float = 1.0
    #: Bytes to turn one weight into 16 bit: read it, write it.
    dequantise_bytes: float = 0.0
    #: Bytes that a lean layer saves for the backward pass, per hidden element and token (dry run of Llama-3.1-8B).
    lean_saved_bytes: float = 23.1
    #: Extra bytes moved per input and output element of a linear layer.
    product_bytes: float = 0.0
    #: The planner's reason against it.
    reason_against: str = ""


BITS_16 = BaseFormat("16 bit", "16-bit", 16, 2.0)
BITS_32 = BaseFormat("32 bit", "32-bit", 32, 4.0, other_bytes=4.0)
#: Not priced: the host waits for the GPU in every layer (outliers.any()), so that launching overlaps with less.
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
    quantised_file=True, price=1.10, dequantise_bytes=2.52,
)  # fmt: skip

QUANTISED = (NF4, INT8)
SWITCHES = tuple(base_format.setting for base_format in QUANTISED)


def switches(base_format: BaseFormat) -> dict[str, bool]:
    """The recipe's settings that load the base in this format."""
    return {name: name == base_format.setting for name in SWITCHES}


def requested_formats(recipe: Recipe) -> list[BaseFormat]:
    """The quantised formats that the recipe asks for; more than one is an error."""
    return [base_format for base_format in QUANTISED if getattr(recipe, base_format.setting) is True]


def base_format_of(recipe: Recipe) -> BaseFormat:
    """The format of resolved settings. Of a recipe: the requested format, else the dtype's."""
    plain = BITS_32 if recipe.dtype == "float32" else BITS_16
    return next(iter(requested_formats(recipe)), plain)


def is_open(recipe: Recipe, base_format: BaseFormat) -> bool:
    """Whether the recipe leaves this quantised format to the planner."""
    return getattr(recipe, base_format.setting) == "auto"
