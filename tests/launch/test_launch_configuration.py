"""accelerate's own parsers accept the configuration; launches that can't work are refused with every reason."""

from pathlib import Path

import pytest
import torch.distributed.run as torchrun
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import prepare_multi_gpu_env
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from accelerate.utils.launch import _filter_args
from torch.distributed.fsdp import CPUOffloadPolicy

from finetune.card import find_card
from finetune.distributed import accelerate_configuration, deepspeed_configuration, is_distributed
from finetune.errors import RecipeError
from finetune.files import write_json
from finetune.model.build import quantization_config
from finetune.model.transformers_config import load_config
from finetune.planner.planning import plan_recipe, without_rows
from finetune.recipe import load_recipe, recipe_from
from finetune.recipe.yaml import dump
from finetune.settings import resolve_plain

LAUNCHES = [
    {"num_processes": 2},
    {"num_processes": 8, "num_machines": 2, "main_process_ip": "10.0.0.1", "machine_rank": 1},
    {"num_processes": 2, "strategy": "fsdp"},
    {"num_processes": 4, "strategy": "fsdp", "offload": "cpu"},
]

DEEPSPEED = [{"zero_stage": stage, "offload": offload} for stage in (2, 3) for offload in ("none", "cpu")]
DEEPSPEED += [{"zero_stage": 3, "offload": "nvme", "nvme_path": "/nvme"}]


def settings(**launch):
    """Settings as a plan resolves them, with a `launch` section."""
    recipe = recipe_from({"model_name_or_path": "tiny", "dataset": {"path": "support"}, "launch": launch})
    return resolve_plain(
        recipe, dtype="bfloat16", per_device_train_batch_size=2, gradient_accumulation_steps=4, load_in_4bit=True,
        effective_batch_size=8 * recipe.launch.num_processes, load_in_8bit=False,
        optim="adamw_torch_fused", learning_rate=1e-4,
    )  # fmt: skip


def parsed(tmp_path, launch_settings):
    """The arguments of accelerate's launcher from the configuration, after its validation."""
    path = tmp_path / "accelerate.yaml"
    path.write_text(dump(accelerate_configuration(launch_settings, tmp_path / "deepspeed.json")))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "-m", "finetune.run.worker", "RUN"])
    return _validate_launch_command(arguments)[0]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_accelerate_reads_processes_machines_and_strategy_and_makes_torchruns_arguments_of_them(tmp_path, launch):
    arguments = parsed(tmp_path, settings(**launch))
    assert arguments.module and arguments.training_script == "finetune.run.worker"
    assert arguments.num_processes == launch["num_processes"]
    assert arguments.num_machines == launch.get("num_machines", 1)
    assert arguments.machine_rank == launch.get("machine_rank", 0)
    assert arguments.use_fsdp == (launch.get("strategy") == "fsdp")
    assert arguments.multi_gpu == (launch.get("strategy") is None)
    assert arguments.mixed_precision == "bf16"
    prepare_multi_gpu_env(arguments)
    torchruns = _filter_args(arguments, torchrun.get_args_parser(), ["--training_script", "x", "--training_script_args"])
    machines = launch.get("num_machines", 1)
    assert int(torchruns.nproc_per_node) == launch["num_processes"] // machines
    if machines > 1:
        assert (torchruns.node_rank, torchrun.get_rdzv_endpoint(torchruns)) == (1, "10.0.0.1:29500")


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_accelerate_makes_an_fsdp2_plugin_of_it(tmp_path, monkeypatch, offload):
    arguments = parsed(tmp_path, settings(num_processes=2, strategy="fsdp", offload=offload))
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) == (offload == "cpu")
    assert plugin.activation_checkpointing is False and plugin.cpu_ram_efficient_loading is False
    assert "FULL" in str(plugin.state_dict_type)


@pytest.mark.parametrize("launch", DEEPSPEED)
def test_accelerate_reads_the_deepspeed_configuration(tmp_path, launch):
    launch_settings = settings(num_processes=2, strategy="deepspeed", **launch)
    arguments = parsed(tmp_path, launch_settings)
    assert arguments.use_deepspeed and arguments.deepspeed_multinode_launcher == "standard"
    write_json(Path(arguments.deepspeed_config_file), deepspeed_configuration(launch_settings))
    parsed_config = HfDeepSpeedConfig(arguments.deepspeed_config_file)
    assert parsed_config.get_value("zero_optimization.stage") == launch["zero_stage"]
    assert parsed_config.get_value("train_batch_size") == 2 * 4 * 2


def test_several_machines_talk_over_machine_0_one_takes_a_free_port_and_one_process_needs_no_launcher():
    two_machines = accelerate_configuration(settings(num_processes=2, num_machines=2, main_process_ip="10.0.0.1"), Path("x"))
    one_machine = accelerate_configuration(settings(num_processes=2), Path("x"))
    assert (two_machines["main_process_ip"], two_machines["main_process_port"]) == ("10.0.0.1", 29500)
    assert one_machine["main_process_port"] == 0
    assert not is_distributed(settings())
    assert is_distributed(settings(num_processes=2)) and is_distributed(settings(strategy="deepspeed"))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"num_processes": 3, "num_machines": 2, "main_process_ip": "10.0.0.1"}, "not divisible"),
        ({"num_processes": 2, "num_machines": 2}, "can't reach"),
        ({"num_processes": 2, "machine_rank": 1}, "machine_rank is 1"),
        ({"num_processes": 2, "offload": "cpu"}, "strategy is ddp"),
        ({"num_processes": 2, "strategy": "fsdp", "offload": "nvme", "nvme_path": "/x"}, "needs DeepSpeed ZeRO-3"),
        ({"strategy": "deepspeed", "zero_stage": 2, "offload": "nvme", "nvme_path": "/x"}, "needs DeepSpeed ZeRO-3"),
        ({"strategy": "deepspeed", "zero_stage": 3, "offload": "nvme"}, "needs launch.nvme_path"),
        ({"strategy": "deepspeed", "nvme_path": "/x"}, "nvme_path is set"),
        ({"strategy": "fsdp"}, "num_processes is 1"),
    ],
)
def test_a_launch_that_can_not_work_is_refused(launch, message):
    values = {"model_name_or_path": "tiny", "dataset": "support", "launch": launch}
    with pytest.raises(RecipeError) as error:
        plan_recipe(recipe_from(values), find_card("rtx-4090"), without_rows)
    (problem,) = error.value.problems
    assert message in problem


def test_all_reasons_are_given_at_once_and_a_strategy_that_needs_gpus_is_refused_on_a_cpu(tmp_path):
    launch = {"num_processes": 3, "num_machines": 2, "strategy": "fsdp", "machine_rank": 2}
    values = {"model_name_or_path": "tiny", "dataset": "support", "gpu": "cpu", "optim": "paged_adamw_8bit"}
    with pytest.raises(RecipeError) as error:
        recipe_from({**values, "load_in_8bit": True, "launch": launch})
    assert len(error.value.problems) == 5
    with pytest.raises(RecipeError, match="needs NVIDIA GPUs"):
        load_recipe("tiny-cpu", ["launch.strategy=fsdp", "launch.num_processes=2", "per_device_train_batch_size=1"])


@pytest.mark.parametrize(
    ("strategy", "stage", "dtype"),
    [("ddp", 2, "uint8"), ("fsdp", 2, "bfloat16"), ("deepspeed", 2, "uint8"), ("deepspeed", 3, "bfloat16")],
)
def test_4_bit_weights_are_stored_in_a_dtype_that_the_strategy_can_shard(strategy, stage, dtype):
    launch_settings = settings(num_processes=2, strategy=strategy, zero_stage=stage)
    storage = quantization_config(launch_settings, load_config(launch_settings)).bnb_4bit_quant_storage
    assert str(storage) == f"torch.{dtype}"
