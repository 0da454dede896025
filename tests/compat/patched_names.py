"""The names of libraries that finetune.compat replaces, read from its source, and the methods that classes override."""

import ast
import importlib
import inspect
import pkgutil
from importlib.util import find_spec

import finetune.compat

#: Methods of libraries' classes that finetune overrides.
OVERRIDDEN = [
    "trl.SFTTrainer._save_checkpoint", "trl.SFTTrainer.create_model_card", "trl.SFTTrainer._get_train_sampler",
    "trl.SFTTrainer._get_output_dir", "trl.SFTTrainer.compute_loss", "trl.SFTTrainer.training_step", "trl.SFTTrainer.evaluate",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
]  # fmt: skip
#: Names that no library uses in count_hits.py, and what it lacks.
UNSEEN = {
    "accelerate.accelerator.fsdp2_prepare_model": "GPUs",
    "transformers.trainer.update_fsdp_plugin_peft": "GPUs",
    "transformers.integrations.bitsandbytes.Bnb4bitQuantize.convert": "a GPU",
    "triton.backends.nvidia.driver.CudaDriver.get_empty_cache_for_benchmark": "a GPU",
    "huggingface_hub.constants.HF_HUB_OFFLINE": "a hub that does not answer",
    "datasets.config.HF_HUB_OFFLINE": "a hub that does not answer",
    "transformers.utils.hub.http_user_agent": "a model of the hub",
    "peft.utils.save_and_load.check_file_exists_on_hf_hub": "a model of the hub",
    "transformers.utils.import_utils.create_import_structure_from_path": "a process that has not imported transformers.models",
    "importlib.metadata.packages_distributions": "a process that has not imported TRL",
    "torch.amp.autocast_mode.autocast": "fla-core",
    "triton.runtime.jit.KernelInterface.__getitem__": "fla-core",
    "torch.cuda.device": "mamba-ssm",
    "torch.cuda.get_device_properties": "mamba-ssm",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "a class that is not made yet",
}


def patched_in(module_name: str) -> set[str]:
    """The first arguments of `replace` and `wrap` in a module of finetune.compat."""
    module = importlib.import_module(f"finetune.compat.{module_name}")
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    arguments = {ast.unparse(call.args[0]) for call in calls if getattr(call.func, "id", "") in ("replace", "wrap")}
    # `path`: functions with optional kernels, which are found in a model's code
    names = {eval(argument, vars(module)) for argument in arguments - {"path"}}
    return {name for name in names if not name.startswith("triton.") or find_spec("triton")}  # torch for the CPU lacks it


MODULES = {name for _, name, _ in pkgutil.iter_modules(finetune.compat.__path__)}
PATCHED = sorted(set().union(*map(patched_in, MODULES)))
