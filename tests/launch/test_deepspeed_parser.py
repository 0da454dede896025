"""DeepSpeed's own configuration classes read its configuration. Collected where DeepSpeed is installed (see conftest)."""

import argparse

import pytest
from launch_settings import DEEPSPEED, settings

from finetune.distributed.configuration import deepspeed_configuration


def filled_in(launch_settings):
    """The configuration after transformers has replaced every `auto` and checked the other values against its arguments."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    configuration = HfTrainerDeepSpeedConfig(deepspeed_configuration(launch_settings))
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
    parsed = DeepSpeedConfig(values)
    zero = parsed.zero_config
    assert zero.stage == launch["zero_stage"]
    assert (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps) == (8, 2, 4)
    assert parsed.bfloat16_config.enabled and not parsed.float16_config.enabled
    assert parsed.gradient_clipping == 1.0
    device = launch.get("offload", "none")
    assert (zero.offload_optimizer.device if zero.offload_optimizer else "none") == device
    assert (zero.offload_param.device if zero.offload_param else "none") == (device if launch["zero_stage"] == 3 else "none")
    if device == "nvme":
        assert str(zero.offload_param.nvme_path) == "/nvme"
