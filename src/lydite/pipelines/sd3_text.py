"""Prompts to text features: two CLIP encoders side by side, then T5."""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from lydite.core.errors import ConfigError
from lydite.models.text.clip import CLIPTextModel, CLIPTextOutput
from lydite.models.text.t5 import T5EncoderModel
from lydite.pipelines.networks import Networks
from lydite.pipelines.sd3_files import SD3Files
from lydite.pipelines.watch import Watch


@dataclass(frozen=True)
class Conditioning:
    """Text features of C prompts; with guidance the negative one comes first."""

    text: mx.array  # (C, S, D)
    pooled: mx.array  # (C, P)


def encode(
    files: SD3Files,
    networks: Networks,
    prompts: list[str],
    *,
    text_length: int,
    dtype: mx.Dtype,
    watch: Watch,
) -> Conditioning:
    """Run each encoder once over all prompts, letting go of it when it is done."""
    width = files.components["transformer"].config.joint_attention_dim
    states: list[mx.array] = []
    pooled: list[mx.array] = []
    for name in ("text_encoder", "text_encoder_2"):
        output = _run_clip(networks, name, _ids(files, name, prompts), watch)
        states.append(output.penultimate)
        pooled.append(output.pooled)
        networks.done(name)
    clip = mx.concatenate(states, axis=-1)  # (C, S1, D1 + D2)
    clip = mx.pad(clip, [(0, 0), (0, 0), (0, width - clip.shape[-1])])  # (C, S1, D)
    if "text_encoder_3" in networks:
        t5 = _run_t5(networks, _ids(files, "text_encoder_3", prompts, text_length), watch)
        networks.done("text_encoder_3")
    else:  # the reference then attends to this many zero vectors, which is not nothing
        t5 = mx.zeros((len(prompts), text_length, width), dtype)
    return Conditioning(
        mx.concatenate([clip.astype(dtype), t5.astype(dtype)], axis=1),
        mx.concatenate(pooled, axis=-1).astype(dtype),
    )


def _run_clip(networks: Networks, name: str, ids: mx.array, watch: Watch) -> CLIPTextOutput:
    output = cast(CLIPTextModel, networks.get(name))(ids)
    watch(name, output.penultimate)
    watch(f"{name} pooled", output.pooled)
    mx.eval(output.penultimate, output.pooled)  # before the encoder may be freed
    return output


def _run_t5(networks: Networks, ids: mx.array, watch: Watch) -> mx.array:
    output = cast(T5EncoderModel, networks.get("text_encoder_3"))(ids)  # (C, S2, D)
    watch("text_encoder_3", output)
    mx.eval(output)
    return output


def _ids(files: SD3Files, name: str, prompts: list[str], length: int | None = None) -> mx.array:
    tokenizer = files.tokenizer(name, length)
    ids = np.stack([tokenizer(prompt) for prompt in prompts])
    vocabulary = files.components[name].config.vocab_size
    if int(ids.max()) >= vocabulary:  # MLX would read past the table and say nothing
        raise ConfigError(
            f"{files.tokenizers[name]}: gives token {ids.max()}, but {name} has only "
            f"{vocabulary}. The tokenizer belongs to another model."
        )
    return mx.array(ids)
