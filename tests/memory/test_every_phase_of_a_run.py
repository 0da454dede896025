"""On the CPU: the worker's own run against the dry run of its plan, phase by phase, for each technique and kind of model."""

import itertools

import pytest
from picture_models import kinds, picture_run, save_picture_rows
from real_run import WAITING_BYTES, assert_close, by_phase, forecast, measured, planned, save_model

from finetune.events import read_events
from finetune.layers import experts
from finetune.memory.ledger import batch_of
from finetune.memory.simulate import simulate
from finetune.model.transformers_config import load_config
from finetune.run.worker import Worker

KINDS = ("llama", "qwen3", "gemma3_text", "qwen3_moe")
RECOMPUTED = {"activation_checkpointing": True}
EVERY_2 = RECOMPUTED | {"activation_checkpointing_every_n_layers": 2}
NF4 = {"load_in_4bit": True}
#: Whichever two rows meet, one is padded.
UNEVEN = {"per_device_train_batch_size": 2, "lengths": tuple(range(128, 112, -2))}
KTO = {"method": "kto", "per_device_eval_batch_size": 2} | UNEVEN
#: The grid of formats of the base, and what is recomputed.
PAIRS = {
    f"dpo{base}{recomputed}": {"method": "dpo"} | quantised | checkpointing
    for (base, quantised), (recomputed, checkpointing) in itertools.product(
        [("", {}), ("-nf4", NF4)], [("", {}), ("-recomputed", RECOMPUTED), ("-every-2", EVERY_2)]
    )
}
TECHNIQUES = {
    "kept": {},
    "recomputed": RECOMPUTED,
    "every-2": EVERY_2,
    "selective": {"activation_checkpointing": "selective"},
    "offload": {"activation_checkpointing": "offload"},
    "adamw-fused": {"optim": "adamw_torch_fused"},
    "adamw-8bit": {"optim": "adamw_8bit"},
    "paged-8bit": {"optim": "paged_adamw_8bit"},
    "paged-32bit": {"optim": "paged_adamw_32bit"},
    "adafactor": {"optim": "adafactor"},
    "lion": {"optim": "lion_8bit"},
    "cpu-adamw": {"optim": "adamw_cpu_offload"},
    "nf4": NF4,
    "nf4-recomputed": RECOMPUTED | NF4,
    "int8-weights": {"load_in_8bit": True},
    "dora": {"use_dora": True},
    "nf4-dora": {"use_dora": True, "load_in_4bit": True},
    "dropout": {"lora_dropout": 0.1},
    "float32": {"dtype": "float32"},
    "eager": {"attn_implementation": "eager"},
    "one-micro-batch": {"gradient_accumulation_steps": 1},
    "padded": UNEVEN,
    "packed": {"packing": True, "lengths": (64, 64)},
    "varlen": {"packing": True, "lengths": (64, 64), "attn_implementation": "torch_varlen"},
    "bf16-adapters": {"adapter_dtype": "bfloat16"},
    "nf4-bf16-adapters": {"adapter_dtype": "bfloat16", "load_in_4bit": True},
    "one-target": {"target_modules": ["q_proj"]},
    "new-tokens": {"new_tokens": [f"<{number}>" for number in range(1900)]},
    "new-tokens-nf4": RECOMPUTED | {"new_tokens": [f"<{number}>" for number in range(1900)], "load_in_4bit": True},
    "tiles": RECOMPUTED | {"mlp_tile_tokens": 48},
    "table": {"offload_embeddings": True},
    "table-tiles-nf4": RECOMPUTED | NF4 | {"mlp_tile_tokens": 48, "offload_embeddings": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    **PAIRS,
    "dpo-offload": {"method": "dpo", "activation_checkpointing": "offload"},
    "dpo-two-pairs": {"method": "dpo", "per_device_train_batch_size": 2},
    "kto": KTO,
    "kto-nf4": KTO | NF4,
    "kto-nf4-recomputed": KTO | RECOMPUTED | NF4,
    "kto-every-2": KTO | EVERY_2,
    "kto-without-kl": KTO | {"loss_type": "apo_zero_unpaired"},
}
#: One of each kind in the ordinary run; together they have every quantisation and half of the techniques.
USUAL = {
    ("llama", "dpo-nf4-recomputed"),
    ("llama", "selective"),
    ("llama", "tiles"),
    ("llama", "table"),
    ("qwen3", "table-tiles-nf4"),
    ("qwen3", "kto-nf4-recomputed"),
    ("gemma3_text", "dpo-nf4-recomputed"),
    ("gemma3_text", "int8-offloaded"),
    ("qwen3_moe", "float32"),
}
CASES = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if (kind, name) in USUAL else pytest.mark.exhaustive)
    for kind in KINDS
    for name in TECHNIQUES
    if not (kind == "qwen3_moe" and ("dora" in name or name == "dropout"))  # PEFT has neither for experts
    and not (kind == "gemma3_text" and name == "embedding")  # its output layer shares the table
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    saved = {}

    def of(kind):
        if kind not in saved:
            saved[kind] = save_model(kind, tmp_path_factory.mktemp(kind))
        return saved[kind]

    return of


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_phase_of_a_run_needs_what_its_dry_run_says(model, tmp_path, kind, name, monkeypatch):
    # a forecast's experts all get rows
    monkeypatch.setattr(experts, "used_experts", lambda offsets, ends: None)
    run, plan = planned(model(kind), tmp_path, **TECHNIQUES[name])
    expected, seen = forecast(plan), measured(run)
    assert seen.get("reference", 0) <= max(expected.values())
    # the answers of pairs wait in twos
    assert_close(expected, seen, 1 if plan.settings.method == "sft" else 2 * plan.settings.per_device_train_batch_size)


def test_experts_without_rows_take_no_memory(model, tmp_path):
    run, plan = planned(model("qwen3_moe"), tmp_path, **TECHNIQUES["nf4-recomputed"])
    expected, seen = forecast(plan), measured(run)
    assert {phase for phase in expected.keys() & seen.keys() if seen[phase] > expected[phase] + WAITING_BYTES} == set()
    of_an_expert = 2 * 32 * 128 * 2  # gate and up in 16 bit
    assert expected["forward"] - seen["forward"] > of_an_expert


@pytest.mark.parametrize(("kind", "masked"), [("llama", False), ("qwen3_moe", True)])
def test_a_model_is_given_the_mask_of_padded_rows_only_where_it_needs_it(model, tmp_path, kind, masked):
    run, _ = planned(model(kind), tmp_path, **TECHNIQUES["padded"], per_device_eval_batch_size=2)
    trainer, _ = Worker(run)._build_trainer()
    input_names = []
    trainer.model.register_forward_pre_hook(lambda model, _, named: input_names.append(sorted(named)), with_kwargs=True)
    trainer.train()
    assert len(input_names) == 5  # two micro-batches in each of two steps, one of the held-out rows
    assert {"attention_mask" in names for names in input_names} == {masked}
    steps = [event for event in read_events(run.events) if event.kind == "step"]
    real, padded = (sum(getattr(step, name) for step in steps) for name in ("real_tokens", "padded_tokens"))
    assert real == sum(TECHNIQUES["padded"]["lengths"]) < padded


#: Rows with pictures of uneven size.
SIZES = [(60, 40), (150, 60), (57, 57), (40, 90), (140, 110), (84, 28)]
#: frozen and trained tower, 32 and 16 bit, 4 bit, recomputed
WITH_PICTURES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "nf4": {"load_in_4bit": True},
    "projector": {"train_vision": "projector"},
    "tower": {"train_vision": "all"},
    "tower-nf4": {"train_vision": "all", "load_in_4bit": True},
    "recomputed": {"activation_checkpointing": True},
    "tower-recomputed": {"train_vision": "all", "activation_checkpointing": True},
    "scaled": {"max_pixels": 4096},
}
USUAL_WITH_PICTURES = {
    ("qwen2_5_vl", "bfloat16"), ("gemma3", "tower"), ("qwen3_vl", "tower-nf4"),
}  # fmt: skip
PICTURE_CASES = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if (kind, name) in USUAL_WITH_PICTURES else pytest.mark.exhaustive)
    for kind in sorted(kinds())
    for name in WITH_PICTURES
]
ON_PICTURES = {
    "dtype": "bfloat16", "per_device_train_batch_size": 1, "activation_checkpointing_every_n_layers": 1, "eval_steps": 2,
    "save_steps": 2, "per_device_eval_batch_size": 1,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), PICTURE_CASES)
def test_every_phase_of_a_run_with_pictures_needs_what_its_dry_run_says(picture_model, tmp_path, kind, name):
    eval_path = save_picture_rows(tmp_path / "rows", SIZES[1:3], "held-out")
    run, plan = picture_run(picture_model(kind), tmp_path, SIZES, eval_path, **ON_PICTURES | WITH_PICTURES[name])
    settings = plan.settings
    batch = batch_of(settings, plan.data.row_shape(settings, plan.data.longest))
    assert_close(by_phase(simulate(load_config(settings), settings, batch, None)), measured(run))
