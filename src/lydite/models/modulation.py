"""What a diffusion transformer's timestep, pooled text and guidance do to its blocks.

Reference: diffusers 0.42.1, models/normalization.py and embeddings.py. None of it depends on the
latents, so a network computes its tables for all steps before the first one.
"""

import mlx.core as mx
import mlx.nn as nn

from lydite.models.kernels import add_gated, add_norm_modulate, norm_modulate
from lydite.models.layers import Linear, MLPEmbedder, silu, sinusoids

Modulation = dict[str, mx.array]  # path of a norm -> its shifts, scales and gates, (B, n, D)


class TimeTextEmbedding(nn.Module):
    """Timestep, pooled text and guidance as one vector, which drives all adaptive norms."""

    def __init__(
        self, dim: int, pooled_dim: int, *, guidance: bool = False, exact: bool = True
    ) -> None:
        super().__init__()
        self.exact = exact  # frequencies of the timestep
        self.timestep_embedder = MLPEmbedder(256, dim)
        if guidance:
            self.guidance_embedder = MLPEmbedder(256, dim)
        self.text_embedder = MLPEmbedder(pooled_dim, dim)

    def __call__(
        self, timesteps: mx.array, pooled: mx.array, guidance: mx.array | None = None
    ) -> mx.array:
        """(S,), (B, P) and, where the network is distilled from guidance, (B,) or (1,)."""
        angles = sinusoids(timesteps, 256, exact=self.exact)
        time = self.timestep_embedder(angles.astype(pooled.dtype))[:, None]
        if guidance is not None:
            time = time + self.guidance_embedder(sinusoids(guidance, 256).astype(pooled.dtype))
        return time + self.text_embedder(pooled)  # (S, B, D)


class AdaLayerNorm(nn.Module):
    """Layer norm without weights, and the linear that makes its shifts, scales and gates.

    Chunk order of the zero form: shift, scale, gate of the attention, then of the feed-forward,
    then of the second attention. The continuous form (2 chunks) is scale, shift.
    """

    def __init__(self, dim: int, chunks: int, *, bias: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.chunks = chunks
        self.linear = Linear(dim, chunks * dim, bias)
        self.norm = nn.LayerNorm(dim, eps=eps, affine=False)

    def table(self, embedding: mx.array) -> mx.array:
        """(..., D) to (..., chunks, D)."""
        return mx.unflatten(self.linear(silu(embedding)), -1, (self.chunks, -1))

    def __call__(self, x: mx.array, table: mx.array) -> mx.array:
        """The normed x under the first shift and scale."""
        scale, shift = (0, 1) if self.chunks == 2 else (1, 0)
        return norm_modulate(self.norm, x, shift=table[:, shift], scale=table[:, scale])


def add_attention_and_feed_forward(
    x: mx.array,
    attended: mx.array,
    norm: nn.LayerNorm,
    layer: nn.Module,
    table: mx.array,
    *,
    gate: int = 2,
) -> mx.array:
    """x plus a gated attention, plus the gated feed-forward of the modulated norm of that sum.

    The gate of the attention is a chunk of the table; the feed-forward has chunks 3, 4 and 5.
    """
    x, normed = add_norm_modulate(
        norm, x, attended, table[:, gate], shift=table[:, 3], scale=table[:, 4]
    )
    return add_gated(x, layer(normed), table[:, 5])


def clip_float16(x: mx.array) -> mx.array:
    """The reference's guard: an overflow becomes float16's largest number, not infinity."""
    return mx.clip(x, -65504, 65504) if x.dtype == mx.float16 else x
