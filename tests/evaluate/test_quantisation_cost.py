"""What quantising costs on held-out rows, beside a computation with transformers alone."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config

from finetune.card import find_card
from finetune.compat.bitsandbytes import without_cpu_repacking
from finetune.errors import CommandError
from finetune.evaluate import quantisation
from finetune.evaluate.quantisation import FormatLoss, QuantisationCost, held_out_rows, measure, measure_plan
from finetune.model.configuration import resolve_model_path
from finetune.planner.planning import encode_rows, plan_recipe, read_rows
from finetune.recipe import load_recipe, recipe_from
from finetune.settings import resolve_plain

CONFIGURATION = Qwen2Config(
    vocab_size=500, hidden_size=192, intermediate_size=320, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, initializer_range=0.05,
)  # fmt: skip


def plan_for(model):
    recipe = recipe_from({"model_name_or_path": str(model), "dataset": "rows.jsonl"})
    return SimpleNamespace(settings=resolve_plain(recipe, dtype="float32", gpu="cpu"), card=SimpleNamespace(is_cpu=True))


def random_rows(vocabulary, count=12):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(8, 40, (count,), generator=generator).tolist()
    ids = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return {"input_ids": ids, "labels": [[-100] * 4 + row[4:] for row in ids]}


def independent_losses(path, rows):
    """Each row by itself, with the loss that transformers computes from labels."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )
    means = {}
    for label, config in {"32 bit": None, "int8": BitsAndBytesConfig(load_in_8bit=True), "NF4": nf4}.items():
        total = tokens = 0
        with without_cpu_repacking(), torch.no_grad():  # repacked 4-bit weights compute in bfloat16
            loading = {"dtype": torch.float32, "device_map": "cpu", "quantization_config": config}
            model = AutoModelForCausalLM.from_pretrained(path, **loading)
            for ids, labels in zip(*rows.values(), strict=True):
                count = sum(label != -100 for label in labels[1:])
                loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss.item()
                total, tokens = total + loss * count, tokens + count
        means[label] = total / tokens
    return means


@pytest.mark.slow
def test_losses_of_a_random_model_equal_an_independent_computation(tmp_path):
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGURATION).save_pretrained(tmp_path)
    rows = random_rows(CONFIGURATION.vocab_size)
    cost = measure(plan_for(tmp_path), rows, None, print)
    assert {entry.label: entry.loss for entry in cost.formats} == pytest.approx(independent_losses(tmp_path, rows), abs=1e-5)
    plain, _, nf4 = cost.formats
    assert nf4.cost == pytest.approx(nf4.loss - plain.loss, abs=1e-9)


@pytest.mark.slow
def test_losses_of_the_bundled_model_equal_an_independent_computation():
    recipe = load_recipe("tiny-cpu", ["dataset.max_rows=60", "dataset.test_split_size=20"])
    rows = held_out_rows(encode_rows(recipe).select(recipe, 256).splits)
    plan = plan_recipe(recipe, find_card("cpu"), read_rows)
    messages = []
    cost = measure_plan(plan, rows, messages.append)
    assert messages[0] == "measuring 32 bit: loading" and "measuring NF4: 19 of 20 rows" in messages
    path = resolve_model_path(plan.settings)
    assert {entry.label: entry.loss for entry in cost.formats} == pytest.approx(independent_losses(path, rows), abs=1e-5)


def test_rows_without_a_trained_token_and_a_model_stored_in_nf4_are_refused(tmp_path):
    with pytest.raises(CommandError, match="no held-out row has a trained token"):
        measure_plan(plan_for(tmp_path), {"input_ids": [[1, 2]], "labels": [[-100, -100]]}, print)
    with pytest.raises(CommandError, match="no rows are held out"):
        measure_plan(plan_for(tmp_path), {"input_ids": [], "labels": []}, print)
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGURATION.to_dict(), "quantization_config": stored}))
    with pytest.raises(CommandError, match="is already stored in NF4"):
        measure_plan(plan_for(tmp_path), random_rows(100), print)


def test_the_sentence_says_what_can_not_be_told():
    int8, nf4 = FormatLoss("int8", 1.5004, 0.0004, -0.0003, 0.0011), FormatLoss("NF4", 1.512, 0.012, 0.008, 0.016)
    costs = QuantisationCost("m", 60, 900, (FormatLoss("16 bit", 1.5), int8, nf4))
    assert costs.sentence == (
        "on 60 held-out rows the base model has a loss of 1.5000 in 16 bit; int8 can't be told from it (+0.00040 of loss, "
        "95 % interval -0.00030 to 0.00110); NF4 costs 0.0120 of loss (95 % interval 0.0080 to 0.0160)"
    )
    without = QuantisationCost("m", 60, 900, (FormatLoss("16 bit", 1.5), nf4)).sentence
    assert "0.0160); int8 was not measured: it does not fit" in without


def test_the_measuring_process_gets_the_gpu_of_a_parent_that_hides_it(monkeypatch):
    arguments = []
    monkeypatch.setattr(quantisation, "cards_of", lambda plan: ("GPU-1", "GPU-2"))
    context = SimpleNamespace(Process=lambda target, args: arguments.extend(args) or SimpleNamespace(start=lambda: 1 / 0))
    monkeypatch.setattr(quantisation, "get_context", lambda kind: context)
    with pytest.raises(ZeroDivisionError):
        measure_plan(plan_for("unread"), {"input_ids": [[1, 2]], "labels": [[1, 2]]}, print)
    assert arguments[1] == ("GPU-1",)
