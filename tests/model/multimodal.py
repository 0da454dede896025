"""Small multimodal checkpoints of the real classes, with random weights and the bundled model's tokenizer."""

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, Gemma3Config, Llama4Config, Qwen3VLConfig

from finetune.bundled import model_path

#: A language model with the vocabulary of the bundled tokenizer.
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


def gemma3(vocabulary):
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    return Gemma3Config(
        text_config={**TEXT, **layers, "vocab_size": vocabulary}, vision_config=vision, mm_tokens_per_image=1,
        image_token_index=5, boi_token_index=6, eoi_token_index=7,
    )  # fmt: skip


def qwen3_vl(vocabulary):
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
    return Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope, "vocab_size": vocabulary}, vision_config=vision,
        image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8,
    )  # fmt: skip


def llama4(vocabulary):
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "attention_chunk_size": 64}
    return Llama4Config(text_config={**TEXT, **experts, "vocab_size": vocabulary}, vision_config=vision)


CONFIGURATIONS = {"gemma3": gemma3, "qwen3_vl": qwen3_vl, "llama4": llama4}


def save_checkpoint(kind, folder, **more):
    """Save a checkpoint in several files, with a tokenizer and a processor's file; returns the whole model."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(CONFIGURATIONS[kind](len(tokenizer))).eval()
    whole.save_pretrained(folder, max_shard_size="100KB", **more)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "any"}')
    return whole


def image_features(whole):
    """What the model's vision part makes of an image."""
    generator = torch.Generator().manual_seed(1)
    if whole.config.model_type == "gemma3":
        return whole.get_image_features(pixel_values=torch.randn(1, 3, 28, 28, generator=generator)).pooler_output
    pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
    return torch.cat(whole.get_image_features(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]])).pooler_output)
