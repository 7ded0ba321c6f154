"""Latents as tokens of 2 × 2 positions, as FLUX and Qwen-Image take them.

Reference: diffusers 0.42.1, `_pack_latents` and `_unpack_latents` of both pipelines. In a token the
latent channel comes first, then the row, then the column.
"""

import mlx.core as mx


def pack_latents(latents: mx.array) -> mx.array:
    """(B, h, w, C) to (B, h/2 · w/2, 4C)."""
    B, height, width, C = latents.shape
    x = latents.reshape(B, height // 2, 2, width // 2, 2, C)
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(B, height * width // 4, 4 * C)


def unpack_latents(tokens: mx.array, height: int, width: int) -> mx.array:
    """(B, h/2 · w/2, 4C) to (B, h, w, C) for latents of this height and width."""
    B, _, C = tokens.shape
    x = tokens.reshape(B, height // 2, width // 2, C // 4, 2, 2)
    return x.transpose(0, 1, 4, 2, 5, 3).reshape(B, height, width, C // 4)
