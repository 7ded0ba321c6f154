"""Tensor layout, patches, positions, padding, resizing: classes D of docs/bug-classes.md."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lydite.models.mmdit import PatchEmbed
from lydite.models.vae.kl import AutoencoderKL, Posterior
from lydite.pipelines.noise import NOISES
from seeded_bugs.bugs.weights import CLIP
from seeded_bugs.cases import Apply, Bug, inputs, outputs
from seeded_bugs.patches import ChangedNoise, attribute, entry, forward

PATCH = 2
PAD = [(0, 0), (1, 1), (1, 1), (0, 0)]


def unpatched(again: Any) -> Apply:
    """The transformer's output taken apart into patches (B, h, w, p, q, C) and put together so."""

    def new(self: Any, original: Any, latent: mx.array, *rest: Any) -> mx.array:
        out = original(latent, *rest)
        B, H, W, C = out.shape
        patches = out.reshape(B, H // PATCH, PATCH, W // PATCH, PATCH, C)
        return again(patches.transpose(0, 1, 3, 2, 4, 5)).reshape(B, H, W, C)

    return forward("transformer", new)


def channels_first(patches: mx.array) -> mx.array:
    """Patches read as (C, p, q) instead of (p, q, C)."""
    B, h, w, p, q, C = patches.shape
    return patches.reshape(B, h, w, C, p, q).transpose(0, 1, 4, 2, 5, 3)


def cropped(table: Any) -> Apply:
    """The positional table (side, side, D) cut as table(table, side, rows, columns) has it."""

    def positions(self: Any, height: int, width: int) -> mx.array:
        rows, columns = height // self.patch, width // self.patch
        whole = self.pos_embed.reshape(self.side, self.side, -1)
        return table(whole, self.side, rows, columns).reshape(1, rows * columns, -1)

    return attribute(PatchEmbed, "positions", lambda original: positions)


def centre(whole: mx.array, side: int, rows: int, columns: int) -> mx.array:
    top, left = (side - rows) // 2, (side - columns) // 2
    return whole[top : top + rows, left : left + columns]


def raw_noise(original: Any) -> Any:
    """Noise (C, h, w) whose memory is taken for (h, w, C)."""

    def raw(right: mx.array) -> mx.array:  # (B, h, w, C)
        return mx.contiguous(right.transpose(0, 3, 1, 2)).reshape(right.shape)

    return lambda *about: ChangedNoise(original(*about), raw)


def raw_image(original: Any) -> Any:
    """The decoder's (H, W, 3) whose memory is taken for (3, H, W)."""

    def decode(self: Any, latent: mx.array) -> mx.array:
        image = original(self, latent)
        B, H, W, C = image.shape
        return image.reshape(B, C, H, W).transpose(0, 2, 3, 1)

    return decode


def tiled(x: mx.array) -> mx.array:
    """Twice as large by repeating the whole, not each pixel."""
    return mx.tile(x, (1, 2, 2, 1))


def resized(place: str, resize: Any) -> Apply:
    return forward(place, lambda self, original, x: self.conv(resize(x)))


DOWN = "vae/encoder.down_blocks.0.downsamplers.0"

BUGS = (
    Bug(
        id="noise-raw-buffer",
        cause="raw_buffer",
        bug_class="D37",
        site=outputs("pipeline/noise"),
        apply=entry(NOISES, "torch", raw_noise),
        severity="fatal",
        fix="The noise is (C, h, w) in memory: transpose it, do not reshape it.",
    ),
    Bug(
        id="image-raw-buffer",
        cause="raw_buffer",
        bug_class="D37",
        site=outputs("vae/decode"),
        apply=attribute(AutoencoderKL, "decode", raw_image),
        severity="fatal",
        fix="The decoder's buffer is (H, W, 3); it was read as (3, H, W).",
        held_out=True,
    ),
    Bug(
        id="unpatchify-rows-and-columns",
        cause="unpatchify_order",
        bug_class="D39",
        site=outputs("transformer"),
        apply=unpatched(lambda x: x.transpose(0, 1, 4, 2, 3, 5)),
        fix="Inside a patch rows come before columns.",
    ),
    Bug(
        id="unpatchify-channels-first",
        cause="unpatchify_order",
        bug_class="D39",
        site=outputs("transformer"),
        apply=unpatched(channels_first),
        severity="fatal",
        fix="A patch is (p, q, C), channels last.",
        held_out=True,
    ),
    Bug(
        id="tokens-by-column",
        cause="token_order",
        bug_class="D39",
        site=outputs("transformer/pos_embed"),
        apply=forward(
            "transformer/pos_embed",
            lambda self, original, x, p: self.proj(x).swapaxes(1, 2).flatten(1, 2) + p,
        ),
        severity="fatal",
        fix="Tokens run along rows: flatten (h, w), not (w, h).",
    ),
    Bug(
        id="positions-from-corner",
        cause="position_crop",
        bug_class="D45",
        site=outputs("transformer/pos_embed"),
        apply=cropped(lambda table, side, rows, columns: table[:rows, :columns]),
        fix="Crop the positional table around its centre.",
    ),
    Bug(
        id="positions-transposed",
        cause="position_transposed",
        bug_class="D45",
        site=outputs("transformer/pos_embed"),
        apply=cropped(lambda table, *size: centre(table.swapaxes(0, 1), *size)),
        fix="The positional table is (rows, columns).",
    ),
    Bug(
        id="positions-missing",
        cause="branch_missing",
        bug_class="D45",
        site=outputs("transformer/pos_embed"),
        apply=forward("transformer/pos_embed", lambda self, original, x, p: original(x, 0 * p)),
        fix="Add the positional table to the patches.",
        held_out=True,
    ),
    Bug(
        id="padding-symmetric",
        cause="padding_side",
        bug_class="D40",
        # the padded input has another shape; the convolution's output is the first to compare
        site=(*outputs(f"{DOWN}.conv"), *inputs(f"{DOWN}.conv")),
        apply=forward(DOWN, lambda self, original, x: self.conv(mx.pad(x, PAD))),
        fix="The encoder pads right and bottom only before it halves.",
    ),
    Bug(
        id="upsample-half-pixel",
        cause="resize_kind",
        bug_class="D41",
        site=inputs("vae/decoder.up_blocks.0.upsamplers.0.conv"),
        apply=resized("vae/decoder.up_blocks.0.upsamplers.0", nn.Upsample(2.0, "linear")),
        fix="Double by nearest neighbour.",
    ),
    Bug(
        id="upsample-tiled",
        cause="resize_kind",
        bug_class="D41",
        site=inputs("vae/decoder.up_blocks.1.upsamplers.0.conv"),
        apply=resized("vae/decoder.up_blocks.1.upsamplers.0", tiled),
        severity="fatal",
        fix="Repeat each pixel, not the whole picture.",
        held_out=True,
    ),
    Bug(
        id="colours-reversed",
        cause="channel_order",
        bug_class="F62",
        site=inputs("vae/encoder"),
        apply=attribute(
            AutoencoderKL, "encode", lambda original: lambda self, x: original(self, x[..., ::-1])
        ),
        fix="The picture is RGB.",
    ),
    Bug(
        id="picture-from-zero-to-one",
        cause="pixel_range",
        bug_class="F62",
        site=inputs("vae/encoder"),
        apply=attribute(
            AutoencoderKL, "encode", lambda original: lambda self, x: original(self, (x + 1) / 2)
        ),
        fix="Pixels go from −1 to 1.",
        held_out=True,
    ),
    Bug(
        id="mean-and-variance-exchanged",
        cause="output_order",
        bug_class="D38",
        site=outputs("pipeline/image_latents"),
        apply=attribute(
            AutoencoderKL,
            "encode",
            lambda original: lambda self, x: Posterior(*reversed(original(self, x))),
        ),
        severity="fatal",
        fix="The first half of the channels is the mean.",
    ),
    Bug(
        id="text-positions-off-by-one",
        cause="position_offset",
        bug_class="D43",
        site=inputs(f"{CLIP}.embeddings.position_embedding"),
        apply=forward(
            f"{CLIP}.embeddings",
            lambda self, original, ids: (
                self.token_embedding(ids)
                + self.position_embedding(mx.minimum(mx.arange(ids.shape[1]) + 1, ids.shape[1] - 1))
            ),
        ),
        fix="Positions count from 0.",
    ),
)
