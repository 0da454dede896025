"""What `import finetune` offers to other programs: light, refusing what can't fit, changing nothing that it is not asked to."""

import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from trl import SFTConfig, SFTTrainer

import finetune
from finetune.bundled import model_path
from finetune.errors import DoesNotFit, RecipeError

IMPORTED = """
import os, sys
before = dict(os.environ)
import finetune
finetune.__all__, dir(finetune)
heavy = {"torch", "transformers", "typer", "gradio", "app", "pydantic", "numpy"} & set(sys.modules)
print(sorted(heavy), dict(os.environ) == before)
"""


def small_model(layers=3):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))


def loss_and_gradients(model):
    ids = torch.arange(64).view(2, 32)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def trainer(tmp_path, tokens=32, **arguments):
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True, max_length=None, per_device_train_batch_size=1,
        gradient_checkpointing=False, disable_tqdm=True, save_strategy="no", **arguments,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[5] * tokens]})
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    return SFTTrainer(model=small_model(), args=args, train_dataset=rows, processing_class=tokenizer)


def test_importing_it_loads_nothing_heavy_changes_no_environment_and_an_unknown_name_is_no_attribute():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    result = subprocess.run([sys.executable, "-c", IMPORTED], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "[] True\n"
    with pytest.raises(AttributeError, match="no attribute 'fit_in'"):
        finetune.fit_in  # noqa: B018


@pytest.mark.slow
def test_what_can_not_fit_is_refused_before_the_first_step(tmp_path):
    plain = trainer(tmp_path, tokens=3_000_000)
    before = {name: id(parameter) for name, parameter in plain.model.named_parameters()}
    callback = finetune.MemoryCallback(plain, gpu="rtx-3060")
    plain.add_callback(callback)
    with pytest.raises(DoesNotFit, match="does not fit") as refused:
        plain.train()
    assert "checkpointing=True" in refused.value.fix and plain.state.global_step == 0
    assert not callback.fit and callback.error is None
    assert {name: id(parameter) for name, parameter in plain.model.named_parameters()} == before


def test_a_step_that_fits_is_forecast_and_trained_and_what_is_not_simulated_is_refused(tmp_path, capsys):
    plain = trainer(tmp_path)
    plain.add_callback(finetune.MemoryCallback(plain, gpu="cpu"))
    plain.train()
    assert "finetune: forecast fits: " in capsys.readouterr().err and plain.state.global_step == 1
    with pytest.raises(RecipeError, match="can't forecast a trainer's step with torch_compile, use_liger_kernel"):
        finetune.fits(trainer(tmp_path, torch_compile=True, use_liger_kernel=True), gpu="rtx-4090")


def test_lean_layers_save_less_and_give_the_same_gradients_and_need_decoder_layers():
    model = small_model()
    with finetune.track(model) as before:
        loss, gradients = loss_and_gradients(model)
    model.zero_grad()
    summary = finetune.lean(model)
    assert len(summary) == 3 and "1 MLP" in summary[0]
    with finetune.track(model) as memory:
        lean_loss, lean_gradients = loss_and_gradients(model)
    assert memory.peak_bytes < 0.9 * before.peak_bytes
    assert lean_loss == pytest.approx(loss, rel=1e-6)
    assert all(
        torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6) for ours, theirs in zip(lean_gradients, gradients, strict=True)
    )
    assert finetune.lean(model, enabled=False) == []
    with pytest.raises(RecipeError, match="no decoder layers"):
        finetune.lean(torch.nn.Linear(2, 2))


def test_a_plan_is_that_of_the_command_line():
    plan = finetune.plan(str(model_path("tiny")), gpu="rtx-4090", lora_r=16, max_length=512)
    assert plan.verdict == "fits" and plan.settings.lora_r == 16 and plan.card.name == "rtx-4090"
    with pytest.raises(RecipeError, match="lora_runk"):
        finetune.plan(str(model_path("tiny")), gpu="rtx-4090", lora_runk=16)
