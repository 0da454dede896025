"""What lean layers keep in the forecast of a large model, and what the plan says of them."""

import pytest
from tiny_models import config_values, settings

from finetune.memory.depth import at_depth
from finetune.memory.forecast import Batch, RowShape
from finetune.memory.ledger import LargestStep
from finetune.memory.simulate import simulate
from finetune.model.configuration import catalogue
from finetune.model.transformers_config import config_from

TOKENS = 2048
#: Bytes kept for backward per hidden element, token and layer, NF4 with rank 16 (45 to 59 with ordinary layers).
MOST = {"Qwen/Qwen2.5-7B-Instruct": 30.0, "meta-llama/Llama-3.1-8B-Instruct": 23.5, "Qwen/Qwen3-8B": 24.0}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "Qwen/Qwen3-8B")) for name in MOST])
def test_a_layer_of_a_large_model_saves_about_half_the_bytes(name):
    values = catalogue()[name]
    wanted = settings(lora_r=16, activation_checkpointing=False, max_length=TOKENS, lean_layers=True)
    few = at_depth(config_from(values, wanted), 3)
    by_tag = simulate(few, wanted, Batch(1, TOKENS, TOKENS - 1), (8, 9)).peaks[("loss", None)].by_tag
    saved = sum(size for (part, layer), size in by_tag.items() if layer == 1 and part in ("activations", "workspace"))
    assert 0.9 * MOST[name] < saved / TOKENS / values["hidden_size"] <= MOST[name]
    assert by_tag.get(("workspace", 1), 0) == 0


@pytest.mark.parametrize(
    ("kind", "lean_note"),
    [
        ("llama", "lean layers: 8 of 8 with 1 RoPE, 4 linear layers, 1 MLP, 2 norms"),
        pytest.param(
            "falcon",
            "lean layers: 8 of 8 with 1 RoPE (as before: 4 adapter on FalconLinear, 1 LayerNorm)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_plan_says_how_many_layers_are_lean_in_which_parts(kind, lean_note):
    dry = LargestStep(config_values(kind), settings(kind, lean_layers=True), RowShape(64)).dry_run()
    assert lean_note in dry.notes and "repeated" in dry.method
    ordinary = LargestStep(config_values(kind), settings(kind), RowShape(64)).dry_run()
    assert not any("lean" in note for note in ordinary.notes)
