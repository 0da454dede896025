"""Small checkpoints of models of images and text, with random weights, a processor and a template; and rows with pictures."""
# ruff: noqa: E501 - a table

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaOnevisionImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from finetune.bundled import model_path
from finetune.compat.processors import processor_of, save_processor
from finetune.recipe import recipe_from

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}}
QWEN = {
    "start": "<|vision_start|>", "end": "<|vision_end|>", "image": "<|image_pad|>", "video": "<|video_pad|>",
}  # fmt: skip
TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}<|assistant|>{% generation %}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}{{ '<|end|>' }}{% endgeneration %}"
    "{%- else -%}{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ 'PICTURE' }}{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{{ '<|end|>' }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def _siglip(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, **more,
    }  # fmt: skip


def _clip() -> dict[str, Any]:
    return {**_siglip(), "model_type": "clip_vision_model"}


def _qwen_vision(**more: Any) -> dict[str, Any]:
    return {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, **more}


def _qwen_images() -> Any:
    return Qwen2VLImageProcessorPil(patch_size=14, size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16})


def _qwen_ids(ids: Any) -> dict[str, Any]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, map(ids, QWEN.values()), strict=True))


#: Type -> text of a picture in the template, special tokens by their attributes of the tokenizer, configuration, image processor,
#: settings of the processor.
def kinds() -> dict[str, Any]:
    qwen_mark = "<|vision_start|><|image_pad|><|vision_end|>"
    return {
        "qwen2_vl": (qwen_mark, {}, [*QWEN.values()], lambda ids: {
            "text_config": {**TEXT, **MROPE}, **_qwen_ids(ids),
            "vision_config": _qwen_vision(embed_dim=32, hidden_size=64, mlp_ratio=2)}, _qwen_images, {}),
        "qwen2_5_vl": (qwen_mark, {}, [*QWEN.values()], lambda ids: {
            "text_config": {**TEXT, **MROPE}, **_qwen_ids(ids),
            "vision_config": _qwen_vision(hidden_size=32, out_hidden_size=64, intermediate_size=64, fullatt_block_indexes=[1])},
            _qwen_images, {}),
        "qwen3_vl": (qwen_mark, {}, [*QWEN.values()], lambda ids: {
            "text_config": {**TEXT, **MROPE}, **_qwen_ids(ids),
            "vision_config": _qwen_vision(hidden_size=32, out_hidden_size=64, intermediate_size=64, deepstack_visual_indexes=[0],
                                          num_position_embeddings=16)}, _qwen_images, {}),
        "gemma3": ("<boi>", {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}, [], lambda ids: {
            "text_config": {**TEXT, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
            "vision_config": _siglip(), "mm_tokens_per_image": 4, "image_token_index": ids("<img>"), "image_token_id": ids("<img>"),
            "boi_token_index": ids("<boi>"), "eoi_token_index": ids("<eoi>")},
            lambda: Gemma3ImageProcessorPil(size={"height": 56, "width": 56}), {"image_seq_length": 4}),
        "idefics3": ("<image>", {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
                                 "end_of_utterance_token": "<end_of_utterance>"}, [], lambda ids: {
            "text_config": {"model_type": "llama", **TEXT}, "vision_config": {**_siglip(), "model_type": "idefics3_vision"},
            "image_token_id": ids("<image>"), "scale_factor": 2},
            lambda: Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
            {"image_seq_len": 4}),
        "llava": ("<image>", {}, ["<image>"], lambda ids: {
            "text_config": {"model_type": "llama", **TEXT}, "vision_config": _clip(), "image_token_index": ids("<image>"),
            "image_token_id": ids("<image>")},
            lambda: CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
            {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}),
        "llava_next": ("<image>", {}, ["<image>"], lambda ids: {
            "text_config": {"model_type": "llama", **TEXT}, "vision_config": _clip(), "image_token_index": ids("<image>"),
            "image_token_id": ids("<image>"), "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
            lambda: LlavaNextImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56},
                                               image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]]),
            {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}),
        "llava_onevision": ("<image>", {}, ["<image>", "<video>"], lambda ids: {
            "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": _siglip(vision_use_head=False),
            "image_token_index": ids("<image>"), "image_token_id": ids("<image>"), "video_token_id": ids("<video>"),
            "video_token_index": ids("<video>"), "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
            lambda: LlavaOnevisionImageProcessorPil(size={"height": 56, "width": 56},
                                                    image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]]),
            {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}),
        "internvl": ("<image>", {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>",
                                 "video_token": "<video>"}, [], lambda ids: {
            "text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": ids("<image>"), "image_seq_length": 4,
            "vision_config": {"model_type": "internvl_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                              "num_attention_heads": 2, "image_size": [56, 56], "patch_size": [14, 14]}},
            lambda: GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, min_patches=1, max_patches=4),
            {"image_seq_length": 4}),
        "lighton_ocr": ("<image>", {"image_token": "<image>", "image_break_token": "<break>", "image_end_token": "<image_end>"}, [],
            lambda ids: {
            "text_config": {"model_type": "qwen3", **TEXT}, "image_token_id": ids("<image>"), "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                              "num_attention_heads": 2, "head_dim": 16, "patch_size": 14, "image_size": 112}},
            lambda: PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28}),
            {"patch_size": 14, "spatial_merge_size": 2}),
    }  # fmt: skip


def save_picture_model(kind: str, folder: Path) -> str:
    """A small model of this type with its processor."""
    mark, named, tokens, values, images, settings = kinds()[kind]
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*roles, *tokens, *named.values()]})
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", mark)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if named:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": named}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config_class = CONFIG_MAPPING[kind]
    config_values = values(tokenizer.convert_tokens_to_ids)
    config_values["text_config"] = {**config_values["text_config"], "vocab_size": len(tokenizer) + 8}
    config = config_class(**config_values, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_processor(processor_of(PROCESSOR_MAPPING[config_class], images(), tokenizer, **settings), str(folder))
    return str(folder)


def save_picture_rows(folder: Path, sizes: list[tuple[int, int]], name: str = "rows") -> str:
    """A row with a picture of each size, of noise."""
    rng, rows = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate(sizes):
        file = f"{name}-{number}.png"
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / file)
        question = {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": f"Which number{'?' * (number % 3)}"}],
        }
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"Number {number}."}]}
        rows.append(json.dumps({"messages": [question, answer], "images": [file]}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(rows))
    return str(folder / f"{name}.jsonl")


def picture_run(model, folder, sizes, eval_path=None, **more):
    """The run directory of a small recipe on rows with pictures of these sizes, and its plan."""
    from finetune.run.prepare import create_run, prepare

    prepared = prepare(recipe_from({
        "model_name_or_path": model, "gpu": "cpu",
        "dataset": {"path": save_picture_rows(folder / "rows", sizes), "eval_path": eval_path},
        "load_in_4bit": False, "lora_r": 4, "lora_alpha": 8, "target_modules": "all-linear", "gradient_accumulation_steps": 1,
        "max_steps": 3, "learning_rate": 1e-3, "optim": "adamw_torch", "activation_checkpointing": False, "sample_answers": 0,
        "output_dir": str(folder / "run"), **more,
    }))  # fmt: skip
    return create_run(prepared), prepared.plan
