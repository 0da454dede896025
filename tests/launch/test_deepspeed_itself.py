"""DeepSpeed's own configuration classes read what is written for it. Collected where DeepSpeed is installed (see conftest)."""

import argparse

import pytest
from launch_settings import DEEPSPEED, settings

from finetune.distributed.configuration import deepspeed_configuration


def filled_in(wanted):
    """The configuration after transformers has replaced every `auto`, checking the rest against its own arguments."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    configuration = HfTrainerDeepSpeedConfig(deepspeed_configuration(wanted))
    arguments = TrainingArguments(
        output_dir="x",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-4,
        bf16=True,
        use_cpu=True,
    )
    configuration.trainer_config_process(arguments)
    model = argparse.Namespace(config=argparse.Namespace(hidden_size=64))
    configuration.trainer_config_finalize(arguments, model, 10)
    return configuration.config


@pytest.mark.parametrize("launch", DEEPSPEED)
def test_deepspeed_reads_stage_offload_batch_and_precision(launch):
    from deepspeed.runtime.config import DeepSpeedConfig

    values = filled_in(settings(num_processes=1, strategy="deepspeed", **launch))
    assert "auto" not in str(values)
    read = DeepSpeedConfig(values)
    zero = read.zero_config
    assert zero.stage == launch["zero_stage"]
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (8, 2, 4)
    assert read.bfloat16_config.enabled and not read.float16_config.enabled
    assert read.gradient_clipping == 1.0
    place = launch.get("offload", "none")
    assert (zero.offload_optimizer.device if zero.offload_optimizer else "none") == place
    assert (zero.offload_param.device if zero.offload_param else "none") == (place if launch["zero_stage"] == 3 else "none")
    if place == "nvme":
        assert str(zero.offload_param.nvme_path) == "/nvme"
