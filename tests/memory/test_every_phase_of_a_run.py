"""On the CPU: the worker's own run against the dry run of its plan, phase by phase, and what offloaded layers take."""

import functools
import itertools

import pytest
from picture_models import kinds, picture_run, save_picture_rows
from real_run import WAITING_BYTES, assert_close, by_phase, forecast, measured, planned, save_model
from test_depth import both_ways
from tiny_models import config_values, settings

from finetune.card import find_card
from finetune.card.card import PROCESS_BYTES
from finetune.events import read_events
from finetune.layers import experts
from finetune.memory.caching_allocator import MIN_BLOCK
from finetune.memory.device_peak import make_forecast
from finetune.memory.forecast import Batch, RowShape
from finetune.memory.ledger import LargestStep, batch_of
from finetune.memory.simulate import simulate
from finetune.model.transformers_config import load_config
from finetune.run.worker import Worker
from finetune.settings.compatibility import BUFFERS

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
    return functools.cache(lambda kind: save_model(kind, tmp_path_factory.mktemp(kind)))


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


ONE_ROW = Batch(1, 64, 63, held_out=Batch(1, 64, 63))
WEIGHTS = {"16-bit": {"load_in_4bit": False}, "nf4": {}}
#: Tensors of a layer of 4-bit weights that leave the card: codes and three of their scales for each of 7 matrices.
MOST_TENSORS = 4 * 7


def offloading(layers, tier="cpu"):
    return {"layer_offloading": tier, "offloaded_layers": layers} if tier else {}


def dry(layers, **changes):
    return LargestStep(config_values(num_hidden_layers=layers), settings(**changes), RowShape(64)).dry_run()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_card_holds_two_buffers_in_place_of_all_layers(kind):
    resident, offloaded = dry(6, **WEIGHTS[kind]), dry(6, **WEIGHTS[kind], **offloading(6))
    layer_bytes = offloaded.largest_offloaded_bytes
    assert offloaded.offloaded_bytes == offloaded.host_bytes - resident.host_bytes == 6 * layer_bytes
    rounded = 6 * MOST_TENSORS * MIN_BLOCK + 6 * 4096
    for phase in ("train", "eval", "save"):
        assert abs(resident.peaks[phase] - offloaded.peaks[phase] - (6 - BUFFERS) * layer_bytes) <= rounded


@pytest.mark.parametrize(("kind", "layers"), [("16-bit", 7), ("nf4", 8)])
def test_a_few_layers_stand_for_an_odd_and_an_even_number(kind, layers):
    few, whole, _ = both_ways(layers=layers, batch=ONE_ROW, **WEIGHTS[kind], **offloading(layers))
    assert few.depth.times and by_phase(few) == by_phase(whole)
    assert few.host == whole.host


def test_some_resident_layers_add_their_weights():
    (_, four, _), (_, six, _) = (both_ways(layers=6, batch=ONE_ROW, **offloading(layers)) for layers in (4, 6))
    some = dry(6, **offloading(4))
    assert some.host_bytes == four.host.total()
    assert some.offloaded_bytes == 4 * some.largest_offloaded_bytes
    peaks = by_phase(four)
    assert {phase: some.peaks[phase] - dry(6, **offloading(6)).peaks[phase] for phase in ("eval", "save")} == {
        phase: peaks[phase] - by_phase(six)[phase] for phase in ("eval", "save")
    }


def test_a_file_takes_disk_in_place_of_host_memory_and_the_same_of_the_card():
    config, card = config_values(num_hidden_layers=64), find_card("rtx-4090")
    host, file = (make_forecast(config, settings(**offloading(64, tier)), card, rows=RowShape(64)) for tier in ("cpu", "nvme"))
    run = dry(64, **offloading(64))
    assert host.peaks == file.peaks
    assert file.disk_bytes - host.disk_bytes == run.offloaded_bytes == 64 * run.largest_offloaded_bytes
    assert host.host_bytes >= PROCESS_BYTES + run.offloaded_bytes


@pytest.mark.parametrize("kind", [pytest.param("16-bit", marks=pytest.mark.exhaustive), "nf4"])
def test_a_real_run_with_offloaded_layers_needs_what_its_dry_run_says_to_the_byte(model, tmp_path, kind):
    seen, expected = {}, {}
    for tier in (False, "cpu"):
        (tmp_path / str(tier)).mkdir()
        changes = {"load_in_4bit": kind == "nf4", "activation_checkpointing": True, **offloading(3, tier)}
        run, plan = planned(model("llama"), tmp_path / str(tier), **changes)
        expected[tier], seen[tier] = forecast(plan), measured(run)
    for phase in ("forward", "loss", "loss backward", "backward", "optimizer", "save", "eval"):
        assert seen[False][phase] - seen["cpu"][phase] == expected[False][phase] - expected["cpu"][phase] > 0, phase
    assert abs(seen["cpu"]["load"] - expected["cpu"]["load"]) <= 0.005 * seen["cpu"]["load"]
