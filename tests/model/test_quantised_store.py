"""The folder of quantised weights: bit-identical to loading, whole or absent, and never another model's."""

import functools
import os
import signal
import tracemalloc

import pytest
import torch
from small_models import SMALL, load
from small_models import settings as plain_settings
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

from finetune.compat.bitsandbytes import disable_cpu_repacking
from finetune.errors import DiskFull
from finetune.layers.quantised_files import clear, complete_models, folder, lock_of, size_bytes
from finetune.layers.quantised_store import Damaged, LayoutMismatch, Store, needed_bytes, parts_of, write_part
from finetune.manifest import changes_in, write_manifest
from finetune.model import quantised_cache
from finetune.model.quantised_cache import base_from, open_store
from finetune.model.transformers_config import load_config
from finetune.system import take_lock

SIZES = {**SMALL, "num_hidden_layers": 3}
MODELS = {
    "untied": LlamaConfig(**SIZES),
    "tied with biases": LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "a mixture": Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2),
    "transposed layers": GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=256, n_positions=64),
}
settings = functools.partial(plain_settings, load_in_4bit=True, attn_implementation="eager")


def files_of(store):
    return {path.name: path.read_bytes() for path in store.path.iterdir()}


def saved(folder, config, seed=0):
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(kind) -> the folder of a small model of that kind."""
    folders = {}

    def folder(kind):
        if kind not in folders:
            folders[kind] = saved(tmp_path_factory.mktemp("model"), MODELS[kind])
        return folders[kind]

    return folder


@pytest.fixture
def messages():
    return []


@pytest.fixture
def stored(models, messages):
    """stored(kind, **settings) -> the model's file, its settings, and its configuration."""

    def opened(kind="untied", **more):
        recipe = settings(models(kind), **more)
        config = load_config(recipe)
        return open_store(recipe, config, "cpu", messages.append), recipe, config

    return opened


def content(model):
    """Every tensor of a base model, with those of quantisation states, and what else a state has."""
    tensors = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    for name, value in model.named_parameters():
        state = getattr(value, "quant_state", None)
        if state is not None:
            tensors |= {f"{name}.{key}": part for key, part in state.as_dict().items()}
            tensors[f"{name}.offset"] = state.offset
            assert state is getattr(getattr(value, "module", None), "quant_state", state)
    return tensors


def equal(a, b):
    if isinstance(a, torch.Tensor):
        bits = [part.detach().contiguous().view(-1).view(torch.uint8) for part in (a, b)]  # codes in bf16 may be NaN
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    return a == b


@pytest.mark.slow
@pytest.mark.parametrize("launch", [{}, {"num_processes": 2, "strategy": "fsdp"}], ids=["uint8", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_read_is_bit_for_bit_what_loading_quantises(stored, kind, launch):
    store, recipe, config = stored(kind, launch=launch)
    loaded, read = load(recipe), base_from(store, recipe, config, "cpu")
    there, here = content(loaded), content(read)
    assert list(there) == list(here)
    assert [name for name in there if not equal(there[name], here[name])] == []
    ids = torch.arange(12).view(1, 12)
    for model in (loaded, read):
        disable_cpu_repacking(model)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, read(ids).logits)
    assert read.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert {name for name in vars(loaded) if not name.startswith("_")} <= {*vars(read), "hf_device_map"}
    assert read.config.to_dict() == loaded.config.to_dict() and not read.training


@pytest.mark.parametrize("kind", MODELS)
def test_a_second_start_reads_the_files_of_the_first(stored, messages, kind):
    first, recipe, _ = stored(kind)
    assert len(messages) == 1 and str(first.path) in messages[0]
    assert stored(kind)[0].path == first.path and len(messages) == 1
    needed = needed_bytes(parts_of(load(recipe, weights=False)))
    assert 0 <= needed - size_bytes() < 2300 * len(first.tables) + 256 * len(first.tensors) + 4096


def test_a_layers_file_has_its_tensors(stored):
    from safetensors import safe_open

    store, *_ = stored()
    assert store.parts.keys() == {"layers.0", "layers.1", "layers.2", "outside"}
    for part, names in store.parts.items():
        with safe_open(store.path / f"{part}.safetensors", "pt") as file:
            tables = [f"{name}:{table}" for name in names for table in store.tables.get(name, [])]
            assert set(file.keys()) == {*names, *tables}
            assert all(equal(file.get_tensor(name), store.rows(name)) for name in file.keys())  # noqa: SIM118


def test_rows_are_in_memory_of_their_own(stored):
    store, *_ = stored()
    before = store.rows("lm_head.weight")
    store.rows("lm_head.weight").zero_()
    store.rows("lm_head.weight", 3, 2).zero_()
    assert before.any() and torch.equal(store.rows("lm_head.weight"), before)
    assert torch.equal(store.rows("lm_head.weight", 3, 2), before[3:5])


def test_checking_takes_little_memory_however_large_the_parts_are(tmp_path):
    size = 3 * 2**20
    for part in ("layers.0", "layers.1", "layers.2", "outside"):
        write_part(tmp_path, part, {f"{part}.codes": torch.zeros(size, dtype=torch.uint8)})
    write_manifest(tmp_path, {})
    store = Store(tmp_path)
    tracemalloc.start()
    try:
        store.verify()
        assert tracemalloc.get_traced_memory()[1] < 2 * size
    finally:
        tracemalloc.stop()


def with_a_flipped_bit(content):
    at = len(content) // 3
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("name", "damaged", "problem"),
    [
        ("layers.2.safetensors", with_a_flipped_bit, "layers.2.safetensors"),
        ("outside.safetensors", with_a_flipped_bit, "outside.safetensors"),
        ("layers.2.safetensors", lambda content: b"", "layers.2.safetensors"),
        ("layers.2.safetensors", lambda content: content[:300], "layers.2.safetensors"),
        ("MANIFEST.json", lambda content: b"", "manifest can't be read"),
        ("MANIFEST.json", lambda content: content[:300], "manifest can't be read"),
    ],
)
def test_a_damaged_file_is_detected_and_the_folder_made_again(stored, messages, name, damaged, problem):
    store, *_ = stored()
    before = files_of(store)
    (store.path / name).write_bytes(damaged(before[name]))
    with pytest.raises(Damaged):
        Store(store.path).verify()
    if name != "MANIFEST.json":
        with pytest.raises(Damaged, match=name):
            store.require_unchanged()
    assert files_of(stored()[0]) == before
    assert problem in messages[-2] and "rebuilding it" in messages[-2]


def test_another_revision_of_the_model_has_another_file(tmp_path, messages):
    paths = []
    for seed in (0, 1):
        recipe = settings(saved(tmp_path / "model", MODELS["untied"], seed))
        store = open_store(recipe, load_config(recipe), "cpu", messages.append)
        read = base_from(store, recipe, load_config(recipe), "cpu")
        assert torch.equal(load(recipe).lm_head.weight, read.lm_head.weight)
        paths.append(store.path)
    assert paths[0] != paths[1]


def test_other_settings_of_the_bytes_have_another_file(stored):
    assert len({stored("untied", **more)[0].path for more in ({}, {"dtype": "float16"}, {"load_in_4bit": False})}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("step", "complete"), [("write_manifest", 0), ("rename", 0), ("sync_folder", 1)])
def test_a_process_killed_while_writing_leaves_no_half_file(models, messages, step, complete):
    recipe = settings(models("untied"))
    config = load_config(recipe)
    if (child := os.fork()) == 0:
        setattr(quantised_cache, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            open_store(recipe, config, "cpu", messages.append)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(complete_models()) == complete
    assert size_bytes() > 0  # of what the killed process left
    store = open_store(recipe, config, "cpu", messages.append)
    store.verify()
    assert list(folder().glob("*.partial")) == []


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(stored, models, monkeypatch):
    monkeypatch.setattr(quantised_cache, "free_disk_bytes", lambda path: 1000)
    with pytest.raises(DiskFull, match=r"needs .* only 1000 B are free"):
        stored()
    assert [path for path in folder().iterdir() if path.suffix != ".lock"] == []


def test_a_disk_that_fills_up_leaves_nothing(stored, models):
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limit[1]))
    try:
        with pytest.raises(DiskFull, match="can't be written: File too large"):
            stored()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path for path in folder().iterdir() if path.suffix != ".lock"] == []


def test_each_layer_leaves_memory_before_the_next_is_read(models, messages, monkeypatch):
    recipe = settings(models("untied"))
    config = load_config(recipe)
    alive = []

    def written(folder, part, values):
        if part != "outside":
            alive.append(sorted({name.split(".")[2] for name in values}))
        write_part(folder, part, values)

    monkeypatch.setattr(quantised_cache, "write_part", written)
    layer_bytes, write_layer = [], quantised_cache._LayerWriter.__call__

    def counted(self, model, module, name):
        layer_bytes.append(sum(p.nbytes for n, p in model.named_parameters() if ".layers." in n and not p.is_meta))
        write_layer(self, model, module, name)

    monkeypatch.setattr(quantised_cache._LayerWriter, "__call__", counted)
    store = open_store(recipe, config, "cpu", messages.append)
    assert alive == [["0"], ["1"], ["2"]]
    assert 0 < max(layer_bytes) <= (store.path / "layers.0.safetensors").stat().st_size


def test_clear_deletes_all_files_but_one_that_is_being_written(stored):
    store, *_ = stored()
    weight = store.rows("lm_head.weight")
    (store.path.with_name("other.quantised")).mkdir()
    lock = take_lock(lock_of(store.path))
    clear()
    assert complete_models() == [store.path]
    lock.release()
    clear()
    assert complete_models() == [] and size_bytes() == 0
    assert torch.equal(store.rows("lm_head.weight"), weight)  # open files stay readable


def test_a_folder_with_another_layout_than_the_model_is_made_again(stored, messages):
    store, *_ = stored()
    before = files_of(store)
    write_part(store.path, "layers.2", {"model.layers.2.other": torch.zeros(3)})
    write_manifest(store.path, {})
    assert changes_in(store.path) == []
    assert files_of(stored()[0]) == before and "other library versions" in messages[-2]


def test_a_weight_that_was_not_quantised_is_refused(stored, tmp_path):
    parts = parts_of(load(stored()[1], weights=False))
    with pytest.raises(LayoutMismatch, match="was not quantised"):
        write_part(tmp_path, "layers.0", parts["layers.0"])
    assert list(tmp_path.iterdir()) == []
