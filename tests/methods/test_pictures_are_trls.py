"""Training on rows with pictures is TRL's: its vision collator's batches, and the losses of several steps of its trainer."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Image, Sequence, load_from_disk
from peft import LoraConfig, get_peft_model
from picture_models import kinds, picture_run
from transformers import AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, DataCollatorForVisionLanguageModeling

from finetune.data.pictures.source import open_picture, source_from_dict
from finetune.events import read_events
from finetune.planner.plan import read_plan
from finetune.run.training import PictureCollator, picture_processor_of
from finetune.run.worker import Worker

SIZES = [(60, 40), (150, 60), (57, 57), (40, 90), (120, 100), (84, 28)]
KINDS = sorted(kinds())
USUAL = ("qwen2_5_vl", "gemma3", "idefics3")
CASES = [pytest.param(kind, marks=[] if kind in USUAL else pytest.mark.exhaustive) for kind in KINDS]
SETTINGS = {
    "dtype": "float32", "per_device_train_batch_size": 2, "lean_layers": False, "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
}  # fmt: skip
pytestmark = pytest.mark.slow


def trl_examples(rows):
    """Rows of a run's dataset as TRL takes them, in the order of the file."""
    lines = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    return [{"messages": line["messages"], "images": line["images"]} for line in lines]


@pytest.mark.parametrize("kind", CASES)
def test_a_batch_is_that_of_trls_vision_collator(picture_model, tmp_path, kind):
    run, plan = picture_run(picture_model(kind), tmp_path, SIZES, **SETTINGS)
    processor = picture_processor_of(plan.settings, run.data)
    rows = [dict(row) for row in load_from_disk(str(run.data / "train"))]
    ours = PictureCollator(DataCollatorForLanguageModeling(pad_token_id=0), processor)(rows)
    examples = trl_examples(tmp_path / "rows" / "rows.jsonl")
    for example, row in zip(examples, rows, strict=True):
        example["images"] = [open_picture(source_from_dict(picture)) for picture in row["pictures"]]
    theirs = DataCollatorForVisionLanguageModeling(processor.processor, assistant_only_loss=True)(examples)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert same(ours[name], value), name


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    return all(same(*pair) for pair in zip(ours, theirs, strict=True))


def trl_losses(run, folder):
    """The losses of TRL's own trainer on the whole model, with the run's rows in its order and its first adapter."""
    settings = read_plan(run.plan).settings
    own, _ = Worker(run)._build_trainer()
    order = list(own._get_train_sampler())
    first = {name: parameter.detach().clone() for name, parameter in own.model.named_parameters() if parameter.requires_grad}
    targets = sorted({name.partition("base_model.model.")[2].partition(".lora_")[0] for name in first})
    base = AutoModelForImageTextToText.from_pretrained(settings.model_name_or_path, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    model.load_state_dict(first, strict=False)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(first)
    rows = trl_examples(folder / "rows" / "rows.jsonl")
    for row in rows:
        row["images"] = [str(folder / "rows" / name) for name in row["images"]]
    dataset = Dataset.from_list(rows).cast_column("images", Sequence(Image()))

    losses = []

    class Trainer(SFTTrainer):
        def _get_train_sampler(self, *_):
            return order

        def compute_loss(self, *arguments, **named):
            loss = super().compute_loss(*arguments, **named)
            losses.append(float(loss.detach()))
            return loss

    arguments = SFTConfig(
        output_dir=str(folder / "trl"), max_length=None, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3,
        lr_scheduler_type="constant", warmup_steps=0, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        bf16=False, disable_tqdm=True, assistant_only_loss=True, gradient_checkpointing=False, max_grad_norm=1.0,
        seed=settings.seed,
        optim="adamw_torch",
    )  # fmt: skip
    processor = picture_processor_of(settings, run.data).processor
    Trainer(model=model, args=arguments, train_dataset=dataset, processing_class=processor).train()
    return losses


@pytest.mark.parametrize("train_vision", ["none", "all"])
@pytest.mark.parametrize("kind", CASES)
def test_losses_are_those_of_trls_trainer_with_its_vision_collator(picture_model, tmp_path, kind, train_vision):
    run, _ = picture_run(picture_model(kind), tmp_path, SIZES, **SETTINGS, train_vision=train_vision)
    theirs = trl_losses(run, tmp_path)
    assert Worker(run).main() == 0
    ours = [event.loss for event in read_events(run.events) if event.kind == "step"]
    assert len(ours) == 3
    assert ours == pytest.approx(theirs, abs=1e-6)
