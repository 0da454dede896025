"""The library's forecast of a plain TRL trainer beside what its real step takes on the CPU, phase by phase."""

import gc

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, TrainerCallback
from trl import SFTConfig, SFTTrainer

import finetune
from finetune.bundled import model_path

TOKENS = 80
PHASES = ("load", "train", "save")


def trainer(tmp_path, *, rows=2, uneven=False, peft=True, dtype=torch.float32, **arguments):
    """TRL's trainer of a small model with 16 rows of random length, or of one length."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    config = Qwen2Config(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokenizer),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    data = Dataset.from_list([{"input_ids": [5] * (TOKENS - number % 4 * 17 * uneven)} for number in range(16)])
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=rows, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, max_length=TOKENS, **{"gradient_checkpointing": False, "bf16": False, **arguments},
    )  # fmt: skip
    lora = LoraConfig(r=16, target_modules="all-linear") if peft else None
    return SFTTrainer(model=model, args=args, train_dataset=data, peft_config=lora, processing_class=tokenizer)


class Phases(TrainerCallback):
    """Sets the phase of the tracker: training is the second step, which has the optimizer's states."""

    def __init__(self, memory):
        self.memory = memory

    def on_step_begin(self, args, state, control, **_):
        gc.collect()
        self.memory.phase = "train" if state.global_step == 1 else "first step"

    def on_pre_optimizer_step(self, args, state, control, **_):
        gc.collect()

    def on_step_end(self, args, state, control, **_):
        gc.collect()
        self.memory.phase = "save"
        self.memory.record()


def measured(plain):
    """Peaks of the trainer's real steps by phase."""
    gc.collect()
    gc.disable()  # cycles are collected between phases only, as in the dry run
    try:
        with finetune.track(plain.model, phase="load") as memory:
            plain.add_callback(Phases(memory))
            plain.train()
    finally:
        gc.enable()
    return {phase: memory.peaks_by_phase[phase] for phase in PHASES}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"bf16": True}, id="bf16 autocast", marks=pytest.mark.exhaustive),
        pytest.param({"bf16": True, "dtype": torch.bfloat16}, id="bf16 weights", marks=pytest.mark.exhaustive),
        pytest.param({"peft": False}, id="all parameters", marks=pytest.mark.exhaustive),
        pytest.param({"gradient_checkpointing": True}, id="checkpointing", marks=pytest.mark.exhaustive),
        pytest.param({"rows": 4, "uneven": True}, id="padded rows", marks=pytest.mark.slow),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation", marks=pytest.mark.exhaustive),
    ],
)
def test_a_plain_trainers_step_takes_what_was_forecast(how, tmp_path):
    fit = finetune.fits(trainer(tmp_path, **how), gpu="cpu")
    forecast = {phase: fit.forecast.peaks[phase] for phase in PHASES}
    assert measured(trainer(tmp_path, **how)) == pytest.approx(forecast, rel=0.005)
    assert fit and sum(fit.forecast.parts.values()) == fit.forecast.peaks["train"]
