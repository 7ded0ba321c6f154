"""A port's trace written again with other names, as another person's port would have it.

Our port has diffusers' names, so its traces say nothing about ports with other names. A naming
takes a recorded trace and writes it again: other names, fewer values, q, k and v in one value, the
step in the name. The right pairs of names are known.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.trace.events import Event
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

Rules = Sequence[tuple[str, str | None]]  # a pattern for whole names, the new name; None: left out
QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Naming:
    """How a port names and records its values; the first rule that matches a name decides."""

    name: str
    about: str
    rules: Rules
    fused: Mapping[str, str]  # a pattern with (q|k|v) in it, and the name of the three together
    step_in_name: bool = False

    def new_name(self, name: str) -> str | None:
        """The new name of a value; None for values that are left out."""
        for pattern, replacement in self.rules:
            if match := re.fullmatch(pattern, name):
                return None if replacement is None else match.expand(replacement)
        return None

    def fused_part(self, name: str) -> tuple[str, str] | None:
        """The name of the fused value this one is a part of, and which of q, k and v it is."""
        for pattern, replacement in self.fused.items():
            if match := re.fullmatch(pattern, name):
                return match.expand(replacement), match["part"]
        return None


def write_renamed(folder: Path, out: Path, naming: Naming) -> dict[str, str | list[str]]:
    """Write a trace with other names to `out`; returns the map.json that is right for it."""
    names: dict[str, str | list[str]] = {}
    with Trace.open(folder) as trace, TraceWriter(out, trace.header) as writer:
        parts: dict[tuple[str, int, int], dict[str, tuple[str, NDArray[Any]]]] = {}
        for event in trace.events:
            if event.kind == "selftest" or not event.slot.startswith("out"):
                continue
            if fused := naming.fused_part(event.name):
                name, part = fused
                collected = parts.setdefault((name, event.step, event.call), {})
                collected[part] = event.name, trace.read(event)
                if len(collected) == len(QKV):
                    value = np.concatenate([collected[part][1] for part in QKV], axis=-1)
                    written = _add(writer, naming, name, value, event)
                    names[written] = [collected[part][0] for part in QKV]
            elif name := naming.new_name(event.name):
                names[_add(writer, naming, name, trace.read(event), event)] = event.name
    return names


def _add(writer: TraceWriter, naming: Naming, name: str, value: NDArray[Any], event: Event) -> str:
    """Write one value; returns its final name."""
    if naming.step_in_name and event.kind != "ids":
        name = f"step{event.step}/{name}"
    step = 0 if naming.step_in_name else event.step
    writer.add(name, value, slot=event.slot, kind=event.kind, step=step, dtype=event.dtype)
    return name


_STREAMS = (("", "x"), ("_context", "context"))
ORIGINAL = Naming(
    "original",
    "the names of the first release: joint blocks, fused qkv, an autoencoder counted from its end",
    rules=(
        (r"transformer", "diffusion_model"),
        (r"transformer/pos_embed\.proj", "diffusion_model/x_embedder.proj"),
        (r"transformer/time_text_embed\.timestep_embedder\.linear_(\d)",
         r"diffusion_model/t_embedder.mlp.\1"),
        (r"transformer/time_text_embed\.text_embedder\.linear_(\d)",
         r"diffusion_model/y_embedder.mlp.\1"),
        (r"transformer/context_embedder", "diffusion_model/context_embedder"),
        (r"transformer/norm_out\.linear", "diffusion_model/final_layer.adaLN_modulation.1"),
        (r"transformer/norm_out\.norm", "diffusion_model/final_layer.norm_final"),
        (r"transformer/proj_out", "diffusion_model/final_layer.linear"),
        *(
            rule
            for tail, stream in _STREAMS
            for block, new in [(r"transformer/transformer_blocks\.(\d+)\.",
                                 rf"diffusion_model/joint_blocks.\1.{stream}_block.")]
            for rule in (
                (rf"{block}norm1{tail}\.linear", rf"{new}adaLN_modulation.1"),
                (rf"{block}norm1{tail}\.norm", rf"{new}norm1"),
                (rf"{block}norm2{tail}", rf"{new}norm2"),
                (rf"{block}ff{tail}\.net\.0\.proj", rf"{new}mlp.fc1"),
                (rf"{block}ff{tail}\.net\.0", rf"{new}mlp.act"),
                (rf"{block}ff{tail}\.net\.2", rf"{new}mlp.fc2"),
                (rf"{block}ff{tail}", rf"{new}mlp"),
                (rf"{block}attn\.norm{'_added' if tail else ''}_([qk])", rf"{new}attn.ln_\2"),
                (rf"{block}attn\.{'to_add_out' if tail else r'to_out.0'}", rf"{new}attn.proj"),
            )
        ),
        (r"transformer/transformer_blocks\.(\d+)\.attn2\.norm_([qk])",
         r"diffusion_model/joint_blocks.\1.x_block.attn2.ln_\2"),
        (r"transformer/transformer_blocks\.(\d+)\.attn2\.to_out\.0",
         r"diffusion_model/joint_blocks.\1.x_block.attn2.proj"),
        (r"transformer/transformer_blocks\.(\d+)", r"diffusion_model/joint_blocks.\1"),
        (r"text_encoder/(.+)", r"clip_l/transformer.\1"),
        (r"text_encoder_2/(.+)", r"clip_g/transformer.\1"),
        (r"text_encoder_3/(.+)", r"t5xxl/transformer.\1"),
        *(
            (rf"vae/decoder\.up_blocks\.{i}\.resnets\.(\d)(\..+)?",
             rf"first_stage_model/decoder.up.{2 - i}.block.\1\2")
            for i in range(3)
        ),
        *(
            (rf"vae/decoder\.up_blocks\.{i}\.upsamplers\.0\.conv",
             rf"first_stage_model/decoder.up.{2 - i}.upsample.conv")
            for i in range(3)
        ),
        (r"vae/decoder\.mid_block\.resnets\.0(\..+)?", r"first_stage_model/decoder.mid.block_1\1"),
        (r"vae/decoder\.mid_block\.resnets\.1(\..+)?", r"first_stage_model/decoder.mid.block_2\1"),
        (r"vae/decoder\.mid_block\.attentions\.0\.to_([qkv])",
         r"first_stage_model/decoder.mid.attn_1.\1"),
        (r"vae/decoder\.mid_block\.attentions\.0\.to_out\.0",
         r"first_stage_model/decoder.mid.attn_1.proj_out"),
        (r"vae/decoder\.mid_block\.attentions\.0", r"first_stage_model/decoder.mid.attn_1"),
        (r"vae/decoder\.conv_norm_out", "first_stage_model/decoder.norm_out"),
        (r"vae/decoder\.(conv_in|conv_out)", r"first_stage_model/decoder.\1"),
        (r"pipeline/latents", "x"),
        (r"pipeline/velocity", "denoised_cfg"),
        (r"pipeline/prompt_embeds", "c_crossattn"),
        (r"pipeline/pooled", "y"),
        (r"pipeline/(noise|image|sigmas|image_latents|token_ids.*)", r"\1"),
    ),
    fused={
        r"transformer/transformer_blocks\.(\d+)\.attn\.to_(?P<part>[qkv])":
            r"diffusion_model/joint_blocks.\1.x_block.attn.qkv",
        r"transformer/transformer_blocks\.(\d+)\.attn2\.to_(?P<part>[qkv])":
            r"diffusion_model/joint_blocks.\1.x_block.attn2.qkv",
        r"transformer/transformer_blocks\.(\d+)\.attn\.add_(?P<part>[qkv])_proj":
            r"diffusion_model/joint_blocks.\1.context_block.attn.qkv",
    },
)  # fmt: skip
SHORT = Naming(
    "short",
    "attributes of one letter, and only where a weight is used",
    rules=(
        (r"transformer/pos_embed\.proj", "net/x_in"),
        (r"transformer/time_text_embed\.timestep_embedder\.linear_(\d)", r"net/t\1"),
        (r"transformer/time_text_embed\.text_embedder\.linear_(\d)", r"net/y\1"),
        (r"transformer/context_embedder", "net/c_in"),
        (r"transformer/norm_out\.linear", "net/fmod"),
        (r"transformer/norm_out\.norm", "net/fln"),
        (r"transformer/proj_out", "net/out"),
        *(
            rule
            for tail, stream in (("", "a"), ("_context", "b"))
            for block, new in [(r"transformer/transformer_blocks\.(\d+)\.",
                                 rf"net/layers.\1.{stream}.")]
            for rule in (
                (rf"{block}norm1{tail}\.linear", rf"{new}mod"),
                (rf"{block}norm1{tail}\.norm", rf"{new}ln"),
                (rf"{block}ff{tail}\.net\.0\.proj", rf"{new}up"),
                (rf"{block}ff{tail}\.net\.2", rf"{new}down"),
                (rf"{block}attn\.norm{'_added' if tail else ''}_([qk])", rf"{new}n\2"),
                (rf"{block}attn\.{'to_add_out' if tail else r'to_out.0'}", rf"{new}o"),
            )
        ),
        (r"transformer/transformer_blocks\.(\d+)\.attn\.to_([qkv])", r"net/layers.\1.a.\2"),
        (r"transformer/transformer_blocks\.(\d+)\.attn\.add_([qkv])_proj",
         r"net/layers.\1.b.\2"),
        (r"transformer/transformer_blocks\.(\d+)\.attn2\.(?:to_)?([qkv])",
         r"net/layers.\1.a.\g<2>2"),
        (r"transformer/transformer_blocks\.(\d+)\.attn2\.to_out\.0", r"net/layers.\1.a.o2"),
        (r"text_encoder(_2)?/text_model\.embeddings", r"clip\1/emb"),
        *(
            (rf"text_encoder(_2)?/text_model\.encoder\.layers\.(\d+)\.{old}",
             rf"clip\1/h.\2.{new}")
            for old, new in (
                (r"self_attn\.q_proj", "q"), (r"self_attn\.k_proj", "k"),
                (r"self_attn\.v_proj", "v"), (r"self_attn\.out_proj", "o"),
                (r"layer_norm1", "ln1"), (r"layer_norm2", "ln2"),
                (r"mlp\.fc1", "up"), (r"mlp\.fc2", "down"),
            )
        ),
        (r"text_encoder(_2)?/text_model\.final_layer_norm", r"clip\1/ln_f"),
        (r"text_encoder(_2)?/text_projection", r"clip\1/proj"),
        (r"text_encoder_3/encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.([qkvo])",
         r"t5/h.\1.\2"),
        (r"text_encoder_3/encoder\.block\.(\d+)\.layer\.0\.layer_norm", r"t5/h.\1.ln1"),
        (r"text_encoder_3/encoder\.block\.(\d+)\.layer\.1\.layer_norm", r"t5/h.\1.ln2"),
        (r"text_encoder_3/encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.(wi_0|wi_1|wo)",
         r"t5/h.\1.\2"),
        (r"text_encoder_3/encoder\.final_layer_norm", "t5/ln_f"),
        (r"vae/decoder\.mid_block\.resnets\.(\d)\.(norm1|norm2|conv1|conv2)", r"dec/mid.\1.\2"),
        (r"vae/decoder\.mid_block\.attentions\.0\.to_([qkv])", r"dec/mid.att.\1"),
        (r"vae/decoder\.mid_block\.attentions\.0\.to_out\.0", r"dec/mid.att.o"),
        (r"vae/decoder\.up_blocks\.(\d)\.resnets\.(\d)\.(norm[12]|conv[12]|conv_shortcut)",
         r"dec/up.\1.\2.\3"),
        (r"vae/decoder\.up_blocks\.(\d)\.upsamplers\.0\.conv", r"dec/up.\1.up"),
        (r"vae/decoder\.conv_norm_out", "dec/norm"),
        (r"vae/decoder\.(conv_in|conv_out)", r"dec/\1"),
        (r"pipeline/latents", "z"),
        (r"pipeline/velocity", "v"),
        (r"pipeline/prompt_embeds", "ctx"),
        (r"pipeline/pooled", "pool"),
        (r"pipeline/noise", "z0"),
        (r"pipeline/sigmas", "sched"),
        (r"pipeline/(image|image_latents|token_ids.*)", r"\1"),
    ),
    fused={},
)  # fmt: skip
PRINTED = Naming(
    "printed",
    "a few prints at block boundaries, the step in the name",
    rules=(
        (r"transformer/pos_embed", "img_tokens"),
        (r"transformer/context_embedder", "txt_tokens"),
        (r"transformer/time_text_embed", "vec"),
        (r"transformer/transformer_blocks\.(\d+)", r"block\1_out"),
        (r"transformer/transformer_blocks\.(\d+)\.attn", r"block\1_attn"),
        (r"transformer/transformer_blocks\.(\d+)\.ff", r"block\1_mlp"),
        (r"transformer/proj_out", "unpatched"),
        (r"transformer", "noise_pred"),
        (r"text_encoder(_2)?/text_model\.encoder\.layers\.(\d+)", r"clip\1_layer\2"),
        (r"text_encoder_3/encoder\.block\.(\d+)", r"t5_layer\1"),
        (r"vae/decoder\.up_blocks\.(\d)", r"vae_up\1"),
        (r"vae/decoder\.(conv_in|mid_block|conv_out)", r"vae_\1"),
        (r"pipeline/latents", "latents_next"),
        (r"pipeline/velocity", "noise_pred_cfg"),
        (r"pipeline/prompt_embeds", "prompt_embeds"),
        (r"pipeline/pooled", "pooled"),
        (r"pipeline/(noise|image|image_latents|sigmas|token_ids.*)", r"\1"),
    ),
    fused={},
    step_in_name=True,
)  # fmt: skip
NAMINGS = {naming.name: naming for naming in (ORIGINAL, SHORT, PRINTED)}
