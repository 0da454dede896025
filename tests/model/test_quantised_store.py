"""The file of quantised weights: bit-identical to loading, whole or absent, and never another model's."""

import os
import signal
import tracemalloc

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

from finetune.compat.bitsandbytes import disable_cpu_repacking
from finetune.errors import DiskFull
from finetune.layers import quantised_store
from finetune.layers.quantised_files import clear, complete_files, folder, lock_of, size_bytes
from finetune.layers.quantised_store import (
    Damaged,
    Entry,
    LayoutMismatch,
    Part,
    Store,
    StoreWriter,
    file_bytes,
    parts_of,
)
from finetune.model import quantised_cache
from finetune.model.build import build_base
from finetune.model.quantised_cache import base_from, open_store
from finetune.model.transformers_config import load_config
from finetune.recipe import recipe_from
from finetune.settings import plainest
from finetune.system import take_lock

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
MODELS = {
    "untied": LlamaConfig(**SMALL, intermediate_size=192),
    "tied with biases": LlamaConfig(**SMALL, intermediate_size=192, attention_bias=True, tie_word_embeddings=True),
    "a mixture": Qwen3MoeConfig(**SMALL, intermediate_size=128, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2),
    "transposed layers": GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=256, n_positions=64),
}


def settings(name, **more):
    chosen = {"model_name_or_path": str(name), "dataset": "rows.jsonl", "lora_r": 4, "lora_alpha": 8, "dtype": "bfloat16"}
    chosen |= {"load_in_4bit": True, "load_in_8bit": False, "activation_checkpointing": False, "attn_implementation": "eager"}
    return plainest(recipe_from({**chosen, **more}))


def part_bytes(store, part):
    begin, size = store.byte_range(part)
    return torch.frombuffer(bytearray(store.path.read_bytes()[begin : begin + size]), dtype=torch.uint8)


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
    loaded = build_base(recipe, config, device="cpu", weights=True)
    read = base_from(store, recipe, config, "cpu")
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


def test_a_second_start_reads_the_file_of_the_first(stored, messages):
    first, *_ = stored()
    assert len(messages) == 1 and str(first.path) in messages[0]
    assert stored()[0].path == first.path and len(messages) == 1
    assert first.path.stat().st_size == file_bytes(first.parts)


def test_a_layers_bytes_are_its_tensors_in_order(stored):
    store, *_ = stored()
    for number in range(len(store.parts) - 1):
        begin, size = store.byte_range(f"layers.{number}")
        assert begin % 4096 == size % 4096 == 0
        copied, part = part_bytes(store, f"layers.{number}"), store.parts[number]
        for entry in part.entries:
            in_order = copied[entry.start : entry.start + entry.size].view(getattr(torch, entry.dtype)).view(entry.shape)
            assert torch.equal(in_order, store.rows(part, entry))
        matrices = [entry.table != "" or len(entry.shape) > 1 for entry in part.entries]
        assert matrices == sorted(matrices, reverse=True)


def test_rows_are_in_memory_of_their_own(stored):
    store, *_ = stored()
    part = store.parts[-1]
    entry = next(entry for entry in part.entries if entry.name == "lm_head.weight")
    before = store.rows(part, entry)
    store.rows(part, entry).zero_()
    store.rows(part, entry, 3, 2).zero_()
    assert before.any() and torch.equal(store.rows(part, entry), before)


def test_checking_takes_little_memory_however_large_the_parts_are(tmp_path):
    size = 3 * 2**20
    parts = tuple(Part(f"layers.{number}", (Entry("codes", "", "uint8", (size,), 0),), size) for number in range(4))
    with StoreWriter(tmp_path / "large.safetensors", parts) as writer:
        for part in parts:
            writer.write(part, {"codes": torch.zeros(size, dtype=torch.uint8)})
        writer.finish({})
    store = Store(writer.path)
    tracemalloc.start()
    try:
        store.verify()
        assert tracemalloc.get_traced_memory()[1] < 2 * size
    finally:
        tracemalloc.stop()


def test_safetensors_reads_it(stored):
    from safetensors import safe_open

    store, *_ = stored()
    with safe_open(store.path, "pt") as file:
        assert set(file.keys()) == {"layers.0", "layers.1", "layers.2", "outside"}
        assert torch.equal(file.get_tensor("layers.1"), part_bytes(store, "layers.1"))


@pytest.mark.parametrize("part", ["layers.2", "outside"])
def test_a_flipped_byte_is_detected_and_the_file_rewritten(stored, messages, part):
    store, *_ = stored()
    before = store.path.read_bytes()
    begin, size = store.byte_range(part)
    with store.path.open("r+b") as file:
        file.seek(begin + size // 3)
        old = file.read(1)[0]
        file.seek(begin + size // 3)
        file.write(bytes([old ^ 1]))
    with pytest.raises(Damaged, match=part):
        Store(store.path).verify()
    rewritten, *_ = stored()
    assert part in messages[-2] and "made again" in messages[-2]
    assert rewritten.path.read_bytes() == before


@pytest.mark.parametrize("length", [0, 3000])
def test_a_truncated_file_is_rewritten(stored, length):
    store, *_ = stored()
    whole = store.path.read_bytes()
    store.path.write_bytes(whole[:length])
    assert stored()[0].path.read_bytes() == whole


def test_another_revision_of_the_model_has_another_file(tmp_path, messages):
    paths = []
    for seed in (0, 1):
        recipe = settings(saved(tmp_path / "model", MODELS["untied"], seed))
        store = open_store(recipe, load_config(recipe), "cpu", messages.append)
        loaded = build_base(recipe, load_config(recipe), device="cpu", weights=True)
        read = base_from(store, recipe, load_config(recipe), "cpu")
        assert torch.equal(loaded.lm_head.weight, read.lm_head.weight)
        paths.append(store.path)
    assert paths[0] != paths[1]


def test_other_settings_of_the_bytes_have_another_file(stored):
    assert len({stored("untied", **more)[0].path for more in ({}, {"dtype": "float16"}, {"load_in_4bit": False})}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["last part", "rename", "whole"])
def test_a_process_killed_while_writing_leaves_no_half_file(stored, models, messages, monkeypatch, moment):
    recipe = settings(models("untied"))
    config = load_config(recipe)

    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        write = StoreWriter.write

        def written(self, part, values):
            write(self, part, values)
            if moment == "last part" and part.name == "outside":
                self._file.flush()
                killed()

        StoreWriter.write = written
        if moment == "rename":
            quantised_store.replace = killed
        if moment == "whole":
            quantised_store.sync_folder = killed
        try:
            open_store(recipe, config, "cpu", messages.append)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(complete_files()) == (moment == "whole")
    assert size_bytes() > 0  # of what the killed process left
    store = open_store(recipe, config, "cpu", messages.append)
    store.verify()
    assert [path.name for path in folder().glob(".*")] == []


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(stored, models, monkeypatch):
    monkeypatch.setattr(quantised_cache, "free_disk_bytes", lambda path: 1000)
    with pytest.raises(DiskFull, match=r"needs .* 1000 B are free"):
        stored()
    assert list(folder().glob("*.safetensors*")) == []


def test_a_disk_that_fills_up_leaves_nothing(stored, models):
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(DiskFull, match="can't be written: File too large"):
            stored()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in folder().iterdir() if "safetensors" in path.name] == []


def test_each_layer_leaves_memory_before_the_next_is_read(models, messages, monkeypatch):
    recipe = settings(models("untied"))
    config = load_config(recipe)
    alive = []
    write = StoreWriter.write

    def written(self, part, values):
        if part.name != "outside":
            alive.append(sorted({name.split(".")[2] for name in values}))
        write(self, part, values)

    monkeypatch.setattr(StoreWriter, "write", written)
    layer_bytes, write_layer = [], quantised_cache._LayerWriter.__call__

    def counted(self, model, module, name):
        layer_bytes.append(sum(p.nbytes for n, p in model.named_parameters() if ".layers." in n and not p.is_meta))
        write_layer(self, model, module, name)

    monkeypatch.setattr(quantised_cache._LayerWriter, "__call__", counted)
    store = open_store(recipe, config, "cpu", messages.append)
    assert alive == [["0"], ["1"], ["2"]]
    assert 0 < max(layer_bytes) <= store.parts[0].size


def test_clear_deletes_all_files_but_one_that_is_being_written(stored):
    store, *_ = stored()
    other = store.path.with_name("other.safetensors")
    other.write_bytes(b"unused")
    lock = take_lock(lock_of(store.path))
    clear()
    assert complete_files() == [store.path]
    lock.release()
    clear()
    assert complete_files() == [] and size_bytes() == 0
    store.verify()  # open files stay readable


def test_a_model_with_another_layout_than_the_file_is_refused(stored, messages, tmp_path):
    store, recipe, config = stored()
    parts = parts_of(build_base(recipe, config, device="cpu", weights=False))
    values = {name: torch.zeros(3) for name in parts[0].parameters}
    with StoreWriter(tmp_path / "other.safetensors", parts) as writer, pytest.raises(LayoutMismatch):
        writer.write(parts[0], values)
    assert list(tmp_path.iterdir()) == []
