"""Each setting is flipped, and what changes is compared with the effects that its row of the schema declares."""

import json

import pytest

from finetune.card.card import Card
from finetune.memory.device_peak import make_forecast
from finetune.memory.forecast import RowShape
from finetune.recipe import recipe_from
from finetune.settings import AUTO, resolve_plain
from finetune.settings.reference import settings_reference
from finetune.settings.schema import DatasetRecipe, Decides, LaunchRecipe, Recipe, decided_by

ROWS = {row.name for row in settings_reference()}
SECTIONS = {"dataset": DatasetRecipe, "launch": LaunchRecipe}
MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 65536, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
MODELS = {"a/small": MODEL, "a/larger": {**MODEL, "hidden_size": 128}}
CARDS = {
    "ampere": Card("ampere", 2**34, 2**34, (8, 6), context_bytes=2**28),
    "hopper": Card("hopper", 2**34, 2**34, (9, 0), context_bytes=2**28),
}
#: Another value for each setting, for which neither a hub nor a second GPU or machine is needed.
OTHER = {
    "model_name_or_path": "a/larger", "dtype": "float32", "attn_implementation": "eager", "max_length": 256, "packing": True,
    "excess_length": "truncate", "train_on_inputs": True, "chat_template": "other.jinja", "load_in_4bit": False,
    "adapter_name_or_path": "runs/first",
    "load_in_8bit": True, "lora_r": 64, "lora_alpha": 8.0, "lora_dropout": 0.1, "target_modules": ["q_proj"], "use_dora": True,
    "new_tokens": {"more and": "more"}, "trained_embedding_rows": [512, 520],
    "use_rslora": True, "adapter_dtype": "bfloat16",
    "method": "dpo", "beta": 0.5, "loss_type": "apo_zero_unpaired", "label_smoothing": 0.2, "sft_weight": 0.5,
    "desirable_weight": 2.0, "undesirable_weight": 0.5,
    "effective_batch_size": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
    "num_train_epochs": 5.0, "max_steps": 7, "learning_rate": 1e-5, "lr_scheduler_type": "linear", "warmup_ratio": 0.5,
    "warmup_steps": 5,
    "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": 7, "optim": "adamw_8bit", "activation_checkpointing": True,
    "activation_checkpointing_every_n_layers": 2,
    "lean_layers": True, "mlp_tile_tokens": 64, "offload_embeddings": True, "torch_compile": True,
    "layer_offloading": "cpu", "offloaded_layers": 2,
    "gpu": "hopper", "memory_budget": "9GiB", "host_memory": "64GiB", "output_dir": "runs/other",
    "eval_steps": 0, "early_stopping_patience": 2, "sample_answers": 0, "save_steps": 3,
    "save_total_limit": 9, "per_device_eval_batch_size": 8, "dataloader_num_workers": 2, "report_to": ["tensorboard"],
    "price_per_hour": 0.5,
    "dataset.path": "short.jsonl", "dataset.eval_path": "held.jsonl", "dataset.format": "alpaca",
    "dataset.columns": {"text": "question"}, "dataset.ignore_columns": ["text"], "dataset.json_columns": ["completion"],
    "dataset.image_folder": "pictures",
    "dataset.on_bad_rows": "skip", "dataset.accept_findings": ["leak"],
    "dataset.test_split_size": 2, "dataset.max_rows": 3,
    "launch.num_processes": 2, "launch.num_machines": 2, "launch.machine_rank": 1, "launch.main_process_ip": "10.0.0.1",
    "launch.main_process_port": 1234, "launch.strategy": "fsdp", "launch.zero_stage": 3, "launch.offload": "cpu",
    "launch.nvme_path": "/nvme",
}  # fmt: skip
#: Only a hub has these.
ON_THE_HUB = {
    "model_revision", "trust_remote_code", "dataset.name", "dataset.split", "dataset.eval_split", "dataset.revision",
}  # fmt: skip
#: Only rows with pictures have these, and models that read them: tests/methods/test_pictures_are_trls.py.
OF_PICTURES = {"vision", "train_vision", "max_pixels"}
BASE = {
    "model_name_or_path": "a/small", "dataset": {"path": "long.jsonl", "ignore_columns": ["question"]},
    "gpu": "ampere", "max_length": 512,
    "load_in_4bit": True, "load_in_8bit": False, "lora_r": 8, "lora_alpha": 16.0, "effective_batch_size": 4,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "eval_steps": 10, "save_steps": 10,
    "learning_rate": 1e-4, "memory_budget": "8GiB",
    "packing": False, "dtype": "bfloat16", "optim": "adamw_torch", "activation_checkpointing": False,
}  # fmt: skip
#: Other settings that a flip needs, before and after it.
OTHER_SETTINGS = {
    "torch_compile": {"activation_checkpointing": "offload"},  # compiled layers offload their inputs by other hooks
    "load_in_8bit": {"load_in_4bit": False}, "beta": {"method": "dpo"}, "loss_type": {"method": "kto"},
    "desirable_weight": {"method": "kto"}, "undesirable_weight": {"method": "kto"},
    "label_smoothing": {"method": "dpo", "loss_type": "robust", "label_smoothing": 0.1}, "sft_weight": {"method": "dpo"},
    "mlp_tile_tokens": {"activation_checkpointing": True, "lean_layers": True},
    "activation_checkpointing_every_n_layers": {"activation_checkpointing": True},
    "layer_offloading": {"activation_checkpointing": True},
    "offloaded_layers": {"activation_checkpointing": True, "layer_offloading": "cpu"},
    "effective_batch_size": {"gradient_accumulation_steps": AUTO},
    "per_device_train_batch_size": {"gradient_accumulation_steps": AUTO, "effective_batch_size": AUTO},
    "gradient_accumulation_steps": {"effective_batch_size": AUTO},
    "launch.num_processes": {"effective_batch_size": AUTO},
    "launch.num_machines": {"launch.num_processes": 2, "effective_batch_size": AUTO},
    "launch.machine_rank": {"launch.num_machines": 2, "launch.num_processes": 2, "effective_batch_size": AUTO},
    "launch.strategy": {"launch.num_processes": 2, "effective_batch_size": AUTO},
    "launch.zero_stage": {"launch.num_processes": 2, "launch.strategy": "deepspeed", "effective_batch_size": AUTO},
    "launch.offload": {"launch.num_processes": 2, "launch.strategy": "fsdp", "effective_batch_size": AUTO},
    "launch.nvme_path": {
        "launch.num_processes": 2, "launch.strategy": "deepspeed", "launch.zero_stage": 3, "launch.offload": "nvme",
        "launch.nvme_path": "/first", "effective_batch_size": AUTO,
    },
}  # fmt: skip
#: Tokens of the longest row of a file.
LONGEST = {"long.jsonl": 480, "short.jsonl": 64}


def declared_effects(name):
    """The effects that the setting's row declares."""
    section, _, inner = name.rpartition(".")
    return decided_by(inner, SECTIONS.get(section, Recipe))


def with_settings(values, changes):
    """`values` with dotted `changes`."""
    copy = json.loads(json.dumps(values))
    for name, value in changes.items():
        section, _, inner = name.rpartition(".")
        (copy.setdefault(section, {}) if section else copy)[inner] = value
    return copy


def forecast_bytes(values):
    """Forecast memory of GPU and host, without the disk."""
    settings = resolve_plain(recipe_from(values))
    tokens = min(settings.max_length, LONGEST[settings.dataset.path])
    forecast = make_forecast(MODELS[settings.model_name_or_path], settings, CARDS[settings.gpu], rows=RowShape(tokens))
    return forecast.allocated_bytes, forecast.peak_high_bytes, forecast.peaks, forecast.parts, forecast.host_bytes


def test_every_setting_is_flipped():
    assert set(OTHER) | ON_THE_HUB | OF_PICTURES == ROWS and not set(OTHER) & (ON_THE_HUB | OF_PICTURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_setting_changes_the_forecasts_bytes_just_when_it_says_so(name):
    before = with_settings(BASE, OTHER_SETTINGS.get(name, {}))
    after = with_settings(before, {name: OTHER[name]})
    changed = forecast_bytes(before) != forecast_bytes(after)  # one cache for both: a key that leaves it out shows no change
    assert changed == (Decides.BYTES in declared_effects(name)), name


def test_what_a_section_decides_is_what_its_settings_decide():
    assert decided_by("launch") == Decides.BYTES | Decides.SPEED | Decides.EXACTNESS
    assert Decides.TOKENS in decided_by("dataset")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The files that the flips name, with short and long rows and one that can't be trained on."""
    folder = tmp_path_factory.mktemp("rows")
    text_rows = [{"text": f"row {number} " + "and more " * 4 * number, "question": f"ask {number}"} for number in range(1, 25)]
    files = {"long.jsonl": text_rows, "short.jsonl": text_rows[:6], "held.jsonl": text_rows[-3:]}
    for name, values in files.items():
        (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    numbers = [{"prompt": f"{number} + 1 =", "completion": number + 1} for number in range(4)]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers))
    chat = [{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": f"b {n}"}]} for n in range(4)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat) + '{"messages": []}\n')
    (folder / "pictures").mkdir()
    (folder / "pictures" / "1.png").write_bytes(b"damaged, and not missing")
    (folder / "captions.jsonl").write_text(json.dumps({"image": "1.png", "text": "a shelf"}) + "\n")
    template = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    (folder / "other.jinja").write_text(template)
    return folder


#: Other settings that a flip needs to change tokens.
CHAT = {"dataset.path": "chat.jsonl", "dataset.on_bad_rows": "skip"}
OTHER_TOKEN_SETTINGS = {
    "train_on_inputs": CHAT, "chat_template": CHAT, "dataset.on_bad_rows": {"dataset.path": "chat.jsonl"},
    "dataset.json_columns": {"dataset.path": "numbers.jsonl"}, "dataset.image_folder": {"dataset.path": "captions.jsonl"},
    "dataset.format": {"dataset.on_bad_rows": "skip"}, "seed": {"dataset.test_split_size": 4},
    "max_length": {"excess_length": "drop"}, "excess_length": {"max_length": 64, "excess_length": "drop"},
}  # fmt: skip


def tokens_of(values, folder, monkeypatch):
    """The trainer's input: ids and labels of both splits; a refusal is a result, too."""
    from finetune.data.tokenizer import load_tokenizer
    from finetune.errors import DataError
    from tests.data.small_data import prepare

    monkeypatch.chdir(folder)
    recipe = recipe_from(values)
    try:
        limit = None if recipe.max_length == AUTO else recipe.max_length
        prepared = prepare(recipe, load_tokenizer(recipe), max_length=limit)
    except DataError as error:
        return error.problems
    datasets = [dataset for dataset in (prepared.train, prepared.eval) if dataset is not None]
    return [[(row["input_ids"], row["labels"]) for row in dataset] for dataset in datasets]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(OTHER) - {"model_name_or_path"}))  # another model has another tokenizer
def test_a_setting_changes_the_tokens_just_when_it_says_so(name, rows, monkeypatch):
    gpu = "rtx-4090" if name.startswith("launch") or name == "gpu" else "cpu"
    fixed = {"model_name_or_path": "tiny", "gpu": gpu, "optim": AUTO}
    before = with_settings(BASE, {**fixed, **OTHER_SETTINGS.get(name, {}), **OTHER_TOKEN_SETTINGS.get(name, {})})
    after = with_settings(before, {name: OTHER[name]})
    changed = tokens_of(before, rows, monkeypatch) != tokens_of(after, rows, monkeypatch)
    assert changed == (Decides.TOKENS in declared_effects(name)), name
