"""Where statistics are taken: inputs and outputs of linears and convolutions, q, k, v and softmax.

q, k and v are those that enter the attention: after their norms and the rotation by position,
image and text together. Softmax
lies inside a fused kernel, so it is computed again here, from q and k, in float32, for at most
`ROWS` evenly spaced queries of each head; its channels are the heads.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lydite.calibrate.activations.device_moments import DeviceMoments
from lydite.calibrate.activations.moments import Moments
from lydite.core.dtypes import widen
from lydite.core.errors import NotFiniteError
from lydite.models.layers import on_cpu
from lydite.models.rotary_attention import Rotation, rotate
from lydite.trace.arrays import to_numpy
from lydite.trace.mlx_capture import walk

ROWS = 256  # queries of each head whose softmax is computed
LAYERS = (nn.Linear, nn.QuantizedLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
SLOTS = {"in.0": "in", "out": "out"}
TABLES = (".cos", ".sin")  # how the slots of a rotation end
Place = tuple[str, str]  # layer, and in, out, q, k, v or softmax
Answer = Callable[[], Moments]
Measure = Callable[[mx.array, int], Answer]  # of (…, C) values in so many groups of channels
_STREAMS = (  # of an attention: projection and norm of q and k, projection of v
    (("to_q", "norm_q"), ("to_k", "norm_k"), ("to_v", "")),
    (("add_q_proj", "norm_added_q"), ("add_k_proj", "norm_added_k"), ("add_v_proj", "")),
)


class Attention:
    """One attention module: which modules make its q, k and v, of the image and of the text."""

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.heads = path, int(module.heads)
        self.scale: float | None = getattr(module, "scale", None)  # None: by the width of a head
        self.sources: list[tuple[str, ...]] = []  # for q, k and v each, in the order of tokens
        for parts in zip(*_STREAMS, strict=True):
            names = (norm if norm in module else made for made, norm in parts if made in module)
            self.sources.append(tuple(f"{path}.{name}" for name in names))

    def joined(
        self, held: dict[str, mx.array], which: int, rotation: Rotation | None = None
    ) -> mx.array:
        """q, k or v of all tokens: (B, L, D). Where they are rotated the text comes first."""
        parts = [tokens(held[name]) for name in self.sources[which]]
        if rotation is None:
            return mx.concatenate(parts, axis=1)
        x = mx.concatenate(parts[::-1], axis=1)
        return x if which == 2 else tokens(rotate(_by_head(x, self.heads), rotation))

    def softmax(self, q: mx.array, k: mx.array) -> mx.array:
        """The weights of some queries over all keys: (values, H)."""
        every = -(-q.shape[1] // ROWS)
        q, k = (_by_head(x, self.heads) for x in (q[:, ::every], k))
        scale = self.scale or q.shape[-1] ** -0.5
        scores = (q * scale) @ k.swapaxes(-1, -2)  # (B, H, rows, L)
        weights = mx.softmax(scores, axis=-1, precise=True)
        return weights.transpose(0, 2, 3, 1).reshape(-1, self.heads)


class Places:
    """The observer that makes statistics of one sample after the other.

    On a CPU they are NumPy's, in float64 from the start; a GPU makes them itself.
    """

    def __init__(self, model: nn.Module, group: int = 0, *, measure: Measure | None = None) -> None:
        self._group = group
        self._measure = measure or (moments_now if on_cpu() else DeviceMoments())
        modules = list(walk(model))
        self.layers = {path for path, module in modules if isinstance(module, LAYERS)}
        found = [Attention(path, each) for path, each in modules if "to_q" in each]
        self._attentions = {each.path: each for each in found}
        self._sources = {name for each in found for names in each.sources for name in names}
        self._held: dict[str, mx.array] = {}
        self._tables: dict[tuple[str, str], mx.array] = {}  # of rotations: attention, cos or sin
        self._last: tuple[Any, Answer] | None = None  # an input that several linears share
        self._seen: list[tuple[Place, Answer]] = []

    def wants(self, path: str, slot: str) -> bool:
        """What enters and leaves a layer, and what an attention is made of."""
        if path in self.layers and slot in SLOTS:
            return True
        if path in self._attentions and slot.endswith(TABLES):
            return True
        return slot == "out" and (path in self._sources or path in self._attentions)

    def add(self, path: str, slot: str, value: Any) -> None:
        """Count a value in."""
        if path in self.layers:
            self._seen.append(((path, SLOTS[slot]), self._measured(value, slot)))
        if slot == "out" and path in self._sources:
            self._held[path] = value
        if path in self._attentions and slot.endswith(TABLES):
            self._tables[path, slot[-4:]] = value
        if slot == "out" and path in self._attentions:
            self._attend(self._attentions[path])

    def taken(self) -> dict[Place, Moments]:
        """What the sample showed; the next one begins with nothing."""
        seen: dict[Place, Moments] = {}
        for place, answer in self._seen:
            moments = answer()
            if not moments.is_finite:
                raise NotFiniteError(
                    f"{place[0]} [{place[1]}]: NaN or Inf among its values. Statistics "
                    "of it would mean nothing; run the model in float32, or verify the set."
                )
            seen[place] = seen[place].joined(moments) if place in seen else moments
        self._seen.clear()
        self._held.clear()
        self._last = None
        return seen

    def _attend(self, attention: Attention) -> None:
        cos, sin = (self._tables.pop((attention.path, table), None) for table in TABLES)
        rotation = None if cos is None or sin is None else Rotation(cos, sin)
        q, k, v = (attention.joined(self._held, which, rotation) for which in range(3))
        for name, values in (("q", q), ("k", k), ("v", v), ("softmax", attention.softmax(q, k))):
            self._seen.append(((attention.path, name), self._measure(values, self._group)))
        for names in attention.sources:
            for name in names:
                del self._held[name]

    def _measured(self, value: mx.array, slot: str) -> Answer:
        if self._last is not None and self._last[0] is value:
            return self._last[1]
        answer = self._measure(value, self._group)
        if slot != "out":
            self._last = value, answer
        return answer


def tokens(value: mx.array) -> mx.array:
    """What a projection gives, (B, L, D), or a norm for each head, (B, H, L, D/H), as (B, L, D)."""
    if value.ndim == 4:
        value = value.swapaxes(1, 2)
    return value.astype(mx.float32).reshape(*value.shape[:2], -1)


def moments_now(values: mx.array, group: int) -> Answer:
    """The statistics by NumPy, made before the network goes on."""
    array = widen(to_numpy(values))
    moments = Moments.of(array.reshape(-1, array.shape[-1]), group)  # channels come last everywhere
    return lambda: moments


def _by_head(x: mx.array, heads: int) -> mx.array:
    """(B, L, D) to (B, H, L, D/H)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
