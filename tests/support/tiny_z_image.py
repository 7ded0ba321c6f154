"""Tiny Z-Image models with random weights, made by the reference."""

from pathlib import Path
from typing import Any

from support import tiny_qwen_image, tiny_sd3

# What Qwen3's template makes of one message of the user; thinking is the model's choice or off.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def make_pipeline(folder: Path) -> Path:
    """A whole ZImagePipeline folder in diffusers' layout, with Qwen3 as published: without head."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
    from transformers import Qwen2Tokenizer

    torch.manual_seed(0)
    vocabulary = tiny_qwen_image.write_tokenizer(folder / "seed_tokenizer")
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "seed_tokenizer")
    tokenizer.chat_template = CHAT_TEMPLATE
    pipeline = ZImagePipeline(
        transformer=make_transformer(in_channels=16),
        vae=tiny_sd3.make_vae(use_quant_conv=False, use_post_quant_conv=False),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=make_text_encoder(vocab_size=vocabulary).model,
        tokenizer=tokenizer,
    )
    pipeline.save_pretrained(folder)
    return folder


def make_transformer(**options: Any) -> Any:
    """ZImageTransformer2DModel with two layers of each kind; heads of 24 channels, 4 + 8 + 12."""
    from diffusers import ZImageTransformer2DModel

    settings: dict[str, Any] = {
        "in_channels": 4,
        "dim": 48,
        "n_layers": 2,
        "n_refiner_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 40,
        "axes_dims": [4, 8, 12],
        "axes_lens": [256, 64, 64],
        "norm_eps": 2e-3,  # not what a framework would choose
    }
    return tiny_sd3.randomize(ZImageTransformer2DModel(**{**settings, **options}))


def make_text_encoder(**options: Any) -> Any:
    """Qwen3ForCausalLM with three layers, whose heads are wider than its width asks for."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 40,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 2e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    return tiny_sd3.randomize(Qwen3ForCausalLM(Qwen3Config(**{**settings, **options})))
