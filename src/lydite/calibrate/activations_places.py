"""Where statistics are taken: inputs and outputs of linears and convolutions, q, k, v and softmax.

q, k and v are those that enter the attention: after their norms, image and text together. Softmax
lies inside a fused kernel, so it is computed again here, from q and k, in float32, for at most
`ROWS` evenly spaced queries of each head; its channels are the heads.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.activations_moments import Moments
from lydite.core.dtypes import widen
from lydite.core.errors import NotFiniteError
from lydite.trace.arrays import to_numpy
from lydite.trace.mlx_capture import walk

ROWS = 256  # queries of each head whose softmax is computed
LAYERS = (nn.Linear, nn.QuantizedLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
PORTS = {"in.0": "in", "out": "out"}
Place = tuple[str, str]  # layer, and in, out, q, k, v or softmax
_STREAMS = (  # of an attention: projection and norm of q and k, projection of v
    (("to_q", "norm_q"), ("to_k", "norm_k"), ("to_v", "")),
    (("add_q_proj", "norm_added_q"), ("add_k_proj", "norm_added_k"), ("add_v_proj", "")),
)


class Attention:
    """One attention module: which modules make its q, k and v, of the image and of the text."""

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.heads, self.scale = path, int(module.heads), float(module.scale)
        self.sources: list[tuple[str, ...]] = []  # for q, k and v each, in the order of tokens
        for parts in zip(*_STREAMS, strict=True):
            names = (norm if norm in module else made for made, norm in parts if made in module)
            self.sources.append(tuple(f"{path}.{name}" for name in names))

    def joined(self, held: dict[str, Any], which: int) -> NDArray[np.float32]:
        """q, k or v of all tokens: (B, L, D)."""
        parts = [tokens(held[source]) for source in self.sources[which]]
        return np.concatenate(parts, axis=1)

    def softmax(self, q: NDArray[np.float32], k: NDArray[np.float32]) -> NDArray[np.float32]:
        """The weights of some queries over all keys: (values, H)."""
        every = -(-q.shape[1] // ROWS)
        q, k = (_by_head(x, self.heads) for x in (q[:, ::every], k))
        # In MLX: NumPy's threads wait for each other on matrices as small as these.
        scores = (mx.array(q) * self.scale) @ mx.array(k).swapaxes(-1, -2)  # (B, H, rows, L)
        weights = to_numpy(mx.softmax(scores, axis=-1, precise=True))
        return weights.transpose(0, 2, 3, 1).reshape(-1, self.heads)


class Places:
    """The observer that makes statistics of one sample after the other."""

    def __init__(self, model: nn.Module, group: int = 0) -> None:
        self._group = group
        modules = list(walk(model))
        self.layers = {path for path, module in modules if isinstance(module, LAYERS)}
        found = [Attention(path, each) for path, each in modules if "to_q" in each]
        self._attentions = {each.path: each for each in found}
        self._sources = {name for each in found for names in each.sources for name in names}
        self._held: dict[str, Any] = {}
        self._last: tuple[Any, Moments] | None = None  # an input that several linears share
        self.seen: dict[Place, Moments] = {}

    def wants(self, path: str, port: str) -> bool:
        """What enters and leaves a layer, and what an attention is made of."""
        if path in self.layers and port in PORTS:
            return True
        return port == "out" and (path in self._sources or path in self._attentions)

    def see(self, path: str, port: str, value: Any) -> None:
        """Count a value in."""
        if path in self.layers:
            self._add((path, PORTS[port]), self._moments(value, port))
        if port == "out" and path in self._sources:
            self._held[path] = value
        if port == "out" and path in self._attentions:
            self._attend(self._attentions[path])

    def taken(self) -> dict[Place, Moments]:
        """What the sample showed; the next one begins with nothing."""
        seen, self.seen = self.seen, {}
        self._held.clear()
        self._last = None
        return seen

    def _attend(self, attention: Attention) -> None:
        q, k, v = (attention.joined(self._held, which) for which in range(3))
        for name, values in (("q", q), ("k", k), ("v", v), ("softmax", attention.softmax(q, k))):
            self._add((attention.path, name), Moments.of(rows(values), self._group))
        for names in attention.sources:
            for name in names:
                del self._held[name]

    def _moments(self, value: Any, port: str) -> Moments:
        if self._last is not None and self._last[0] is value:
            return self._last[1]
        moments = Moments.of(rows(widen(to_numpy(value))), self._group)
        if port != "out":
            self._last = value, moments
        return moments

    def _add(self, place: Place, moments: Moments) -> None:
        if not moments.is_finite:
            raise NotFiniteError(
                f"transformer/{place[0]} [{place[1]}]: NaN or Inf among its values. Statistics of "
                "it would mean nothing; run the model in float32, or verify the set."
            )
        known = self.seen.get(place)
        if known is None:
            self.seen[place] = moments
        else:
            self.seen[place] = known.joined(moments)


def rows(values: NDArray[Any]) -> NDArray[np.float32]:
    """(…, C) to (N, C): channels come last everywhere."""
    return values.reshape(-1, values.shape[-1])


def tokens(value: Any) -> NDArray[np.float32]:
    """What a projection gives, (B, L, D), or a norm for each head, (B, H, L, D/H), as (B, L, D)."""
    array = widen(to_numpy(value))
    if array.ndim == 4:
        array = array.transpose(0, 2, 1, 3)
    return array.reshape(*array.shape[:2], -1)


def _by_head(x: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """(B, L, D) to (B, H, L, D/H)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
