"""Equal but different: what a port may do in its own way and must not be reported for."""

import re
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lydite.models import unet
from lydite.pipelines.pipeline import Pipeline
from lydite.sampling.schedules.schedule import Schedule
from seeded_bugs import reference_forwards as ref
from seeded_bugs.bugs.attention import JOINT_ATTENTIONS
from seeded_bugs.bugs.norms import GELUS, GROUP_NORMS
from seeded_bugs.bugs.sampling import guided, sampled
from seeded_bugs.bugs.schedule import scheduled
from seeded_bugs.bugs.weights import BLOCK_1, CLIP_2
from seeded_bugs.cases import Apply, Control
from seeded_bugs.patches import attribute, forward, forwards, module_at, together, weight


def split_k(self: Any, original: Any, *args: Any) -> Any:
    """A linear as two products over halves of its inputs; any other module as it is."""
    if "weight" not in self or self.weight.ndim != 2:
        return original(*args)
    (x,) = args
    half = x.shape[-1] // 2
    y = x[..., :half] @ self.weight[:, :half].T + x[..., half:] @ self.weight[:, half:].T
    return y + self.bias if "bias" in self else y


def fused(self: Any, x: mx.array, names: tuple[str, ...]) -> list[mx.array]:
    """q, k and v from one product; the three linears are never called."""
    parts = [self[name] for name in names]
    weight = mx.concatenate([part.weight for part in parts])
    bias = mx.concatenate([part.bias for part in parts])
    return list(mx.split(x @ weight.T + bias, 3, axis=-1))


def chunked(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any = None) -> mx.array:
    """Attention over blocks of keys with a running maximum and sum, as flash attention does."""
    dtype = v.dtype
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    top = mx.full((*q.shape[:-1], 1), -float("inf"))
    total, out = mx.zeros(top.shape), mx.zeros(q.shape)
    for start in range(0, k.shape[-2], 16):
        scores = (q * scale) @ k[..., start : start + 16, :].swapaxes(-1, -2)
        if mask is not None:
            scores = scores + mask[..., start : start + 16]
        higher = mx.maximum(top, scores.max(axis=-1, keepdims=True))
        weights, old = mx.exp(scores - higher), mx.exp(top - higher)
        total = total * old + weights.sum(axis=-1, keepdims=True)
        out = out * old + weights @ v[..., start : start + 16, :]
        top = higher
    return (out / total).astype(dtype)


def im2col(self: Any, original: Any, x: mx.array) -> mx.array:
    """A 3×3 convolution as one product over gathered neighbourhoods."""
    if self.weight.shape[1] != 3 or self.stride not in (1, (1, 1)):
        return original(x)
    _, H, W, _ = x.shape
    wide = mx.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    parts = [wide[:, i : i + H, j : j + W] for i in range(3) for j in range(3)]
    columns = mx.concatenate(parts, axis=-1)
    return columns @ self.weight.reshape(self.weight.shape[0], -1).T + self.bias


def gelu_by_tanh(self: Any, original: Any, x: mx.array) -> mx.array:
    """The textbook form, ½·x·(1 + tanh(…)), in float32."""
    x = self.proj(x)
    wide = x.astype(mx.float32)
    inner = 0.7978845608028654 * (wide + 0.044715 * mx.power(wide, 3))
    return (0.5 * wide * (1 + mx.tanh(inner))).astype(x.dtype)


class Nothing(nn.Module):
    """A module that hands on what it gets."""

    def __call__(self, x: mx.array) -> mx.array:
        return x


@contextmanager
def with_nothing(pipeline: Pipeline) -> Generator[None]:
    """A module more in the tree, with events of its own and no counterpart."""
    ff = module_at(pipeline, f"{BLOCK_1}.ff")
    ff["extra"] = Nothing()
    try:
        with forward(f"{BLOCK_1}.ff", lambda self, old, x: old(self["extra"](x)))(pipeline):
            yield
    finally:
        del ff["extra"]


def unchanged(_: Pipeline) -> Any:
    return nullcontext()


def attention(component: str, paths: str, form: Any, **how: Any) -> Apply:
    return forwards(component, paths, lambda self, original, *args: form(self, *args, **how))


def norms(component: str, paths: str, form: Any) -> Apply:
    return forwards(component, paths, lambda self, original, x: form(self, x))


def euler(x: Any, denoised: Any, sigma: float, after: float) -> Any:
    """The same step as a mean of where it is and where it goes."""
    return x * (after / sigma) + denoised * (1 - after / sigma)


def narrow(schedule: Schedule) -> Schedule:
    """Tables that passed through float32."""
    sigmas, timesteps = schedule.sigmas.astype(np.float32), schedule.timesteps.astype(np.float32)
    return Schedule(schedule.name, sigmas.astype(np.float64), timesteps.astype(np.float64))


def to_bfloat16(x: mx.array) -> mx.array:
    return x.astype(mx.bfloat16)


def channels_first(name: str, x: Any) -> Any:
    pixels = name.startswith(("vae/", "unet")) and x.ndim == 4 and not ATTENTION.search(name)
    return x.transpose(0, 3, 1, 2) if pixels else x


def without_batch(name: str, x: Any) -> Any:
    return x[0] if x.ndim > 2 and x.shape[0] == 1 else x


def with_batch(name: str, x: Any) -> Any:
    return x[None] if name.startswith(("transformer/", "text_encoder")) else x


ATTENTION = re.compile(r"attentions\.\d+\.to_")

# Of every model.
SAMPLER_CONTROLS: tuple[Control, ...] = (
    Control(
        "euler-as-a-mean",
        "x·(σ′/σ) + denoised·(1 − σ′/σ)",
        "pipeline",
        sampled(euler),
    ),
    Control(
        "schedule-in-float32",
        "sigmas and timesteps that passed through float32",
        "pipeline",
        scheduled(narrow),
    ),
)

CONTROLS = (
    Control(
        "attention-written-out",
        "softmax(q·kᵀ)·v in three lines instead of the fused kernel",
        "transformer",
        attention("transformer", JOINT_ATTENTIONS, ref.joint_attention),
    ),
    Control(
        "attention-chunked",
        "flash attention: blocks of keys, a running maximum and sum",
        "transformer",
        attention("transformer", JOINT_ATTENTIONS, ref.joint_attention, attend=chunked),
    ),
    Control(
        "text-tokens-first",
        "text before image inside the attention, cut apart accordingly",
        "transformer",
        attention(
            "transformer",
            JOINT_ATTENTIONS,
            ref.joint_attention,
            text_first=(True, True),
        ),
    ),
    Control(
        "fused-projection",
        "q, k and v from one product: three modules are never called",
        "transformer",
        attention("transformer", JOINT_ATTENTIONS, ref.joint_attention, project=fused),
    ),
    Control(
        "block-written-out",
        "the block's sums in another order",
        "transformer",
        attention("transformer", r"transformer_blocks\.\d+", ref.joint_block),
    ),
    Control(
        "split-k",
        "every linear as two products over halves of its inputs",
        "transformer",
        forwards("transformer", r".+", split_k),
    ),
    Control(
        "norms-written-out",
        "mean and variance in float32, then the cast",
        "transformer",
        norms("transformer", r".*\.(norm|norm2(_context)?)", ref.layer_norm),
    ),
    Control(
        "rms-norms-written-out",
        "root mean square in float32, then the cast",
        "transformer",
        norms("transformer", r".*\.norm(_added)?_[qk]", ref.rms_norm),
    ),
    Control(
        "gelu-by-tanh",
        "½·x·(1 + tanh …) instead of x·σ(…)",
        "transformer",
        forwards("transformer", GELUS, gelu_by_tanh),
    ),
    Control(
        "extra-module",
        "a module that does nothing, with events of its own",
        "transformer",
        with_nothing,
        exact=True,
    ),
    Control(
        "mask-added",
        "CLIP's causal mask as −1e9 added to the scores",
        "text_encoder",
        attention("text_encoder", r".*\.self_attn", ref.clip_attention),
    ),
    Control(
        "t5-chunked",
        "T5's attention in blocks of keys",
        "text_encoder_3",
        attention("text_encoder_3", r".*\.SelfAttention", ref.t5_attention, attend=chunked),
    ),
    Control(
        "weights-stored-bf16",
        "weights that bfloat16 holds exactly, stored so and computed in float32",
        "text_encoder_2",
        together(
            *(
                weight(
                    f"{CLIP_2}.encoder.layers.{layer}.mlp.{name}.weight",
                    to_bfloat16,
                    keep_dtype=False,
                )
                for layer in range(3)
                for name in ("fc1", "fc2")
            )
        ),
    ),
    Control(
        "pixel-attention-written-out",
        "the VAE's attention in three lines",
        "vae",
        attention("vae", r".*\.attentions\.0", ref.pixel_attention),
    ),
    Control(
        "group-norms-written-out",
        "mean and variance of each group in float32, then the cast",
        "vae",
        norms("vae", GROUP_NORMS, ref.group_norm),
    ),
    Control(
        "im2col",
        "3×3 convolutions as one product over gathered neighbourhoods",
        "vae",
        forwards("vae", r".*(conv|conv\d|conv_in|conv_out)", im2col),
    ),
    Control(
        "cfg-from-cond",
        "cond + (s − 1)·(cond − uncond)",
        "pipeline",
        guided(lambda uncond, cond, scale: cond + (cond - uncond) * (scale - 1)),
    ),
    *SAMPLER_CONTROLS,
    Control(
        "dump-channels-first",
        "the VAE's values written down as (B, C, H, W)",
        "vae",
        unchanged,
        dump=channels_first,
        exact=True,
    ),
    Control(
        "dump-without-batch",
        "a batch of one written down without its axis",
        "vae",
        unchanged,
        dump=without_batch,
        exact=True,
    ),
    Control(
        "dump-with-another-axis",
        "an axis of one in front of every value",
        "transformer",
        unchanged,
        dump=with_batch,
        exact=True,
    ),
)

UNET_CONTROLS = (
    Control(
        "attention-written-out",
        "softmax(q·kᵀ)·v in three lines instead of the fused kernel",
        "unet",
        attribute(unet, "attention", lambda original: ref.attend),
    ),
    Control(
        "attention-chunked",
        "flash attention: blocks of keys, a running maximum and sum",
        "unet",
        attribute(unet, "attention", lambda original: chunked),
    ),
    Control(
        "split-k",
        "every linear as two products over halves of its inputs",
        "unet",
        forwards("unet", r".*(to_[qkv]|to_out\.0|proj_in|proj_out|_proj|linear_[12])", split_k),
    ),
    Control(
        "group-norms-written-out",
        "mean and variance of each group in float32, then the cast",
        "unet",
        norms("unet", r".*(resnets\.\d\.norm[12]|attentions\.\d\.norm|_norm_out)", ref.group_norm),
    ),
    Control(
        "layer-norms-written-out",
        "mean and variance in float32, then the cast",
        "unet",
        norms("unet", r".*transformer_blocks\.\d\.norm[123]", ref.layer_norm),
    ),
    Control(
        "im2col",
        "3×3 convolutions as one product over gathered neighbourhoods",
        "unet",
        forwards("unet", r"conv_in|conv_out|.*(\.conv[12]|upsamplers\.0\.conv)", im2col),
    ),
    *SAMPLER_CONTROLS,
    Control(
        "dump-channels-first",
        "the values of U-Net and VAE written down as (B, C, H, W)",
        "unet",
        unchanged,
        dump=channels_first,
        exact=True,
    ),
)
