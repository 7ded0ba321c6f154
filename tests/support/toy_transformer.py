"""A small diffusion transformer in NumPy, recorded: what the tests of `diff` compare.

`Options` says how a port may differ without being wrong (names, axis orders, fused projections,
precision, order of summation) and which bug it has, if any.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lydite.trace.events import Event, Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

B, H, W, C, HEADS, BLOCKS, WORDS = 2, 4, 6, 32, 4, 4, 5
NUMPY = {
    "float64": np.float64,
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


@dataclass(frozen=True)
class Options:
    """One run."""

    side: str = "port"
    dtype: str = "float32"
    shuffle: bool = False  # sum in another order, as other kernels do
    rename: Callable[[str], str] = str
    channels_first: bool = True  # of the convolutional end
    fused: bool = False  # q, k and v as one value
    split_batch: bool = False  # two calls of one row, the prompt first
    steps: int = 2
    first_step: int = 0
    bug: str = ""
    seed: int = 0
    scale: float = 1.0  # of the residual stream
    inputs: bool = True  # record what modules take
    dims: bool = False
    skip: tuple[str, ...] = ()  # names not recorded
    inject: Path | None = None  # a trace whose values replace this run's own
    conditions: dict[str, Any] = field(default_factory=lambda: {"prompt": "a star", "steps": 2})


def record(folder: Path, options: Options | None = None, **changes: Any) -> Path:
    """Run the toy and leave its trace in `folder`."""
    options = options or Options(**changes)
    header = Header(
        side=options.side, framework="numpy", dtype=options.dtype, conditions=options.conditions
    )
    with TraceWriter(folder, header) as writer:
        _Toy(options, writer).run()
    return folder


class _Toy:
    def __init__(self, options: Options, writer: TraceWriter) -> None:
        self.o, self.writer, self.step = options, writer, options.first_step
        self.injection = Trace.open(options.inject) if options.inject else None
        g = np.random.default_rng(options.seed)

        def matrix(*shape: int) -> Any:
            return self.round(g.standard_normal(shape) / np.sqrt(shape[0]))

        self.weights = [
            {
                **{name: matrix(C, C) for name in ("q", "k", "v", "o")},
                "up": matrix(C, 4 * C),
                "down": matrix(4 * C, C) * np.float64(options.scale),
                "ada": matrix(C, 3 * C),
                "bias": self.round(0.3 * g.standard_normal(C)),
            }
            for _ in range(BLOCKS)
        ]
        self.embedding = matrix(16, C) * 4
        self.noise = g.standard_normal((B, H, W, C))
        self.order = g.permutation(4 * C)

    def round(self, x: Any) -> Any:
        """`x` rounded to the run's precision, held in float64."""
        return np.asarray(x).astype(NUMPY[self.o.dtype]).astype(np.float64)

    def put(self, name: str, value: Any, port: str = "out", **more: Any) -> Any:
        """Record a value, and give it back, or what is injected in its place."""
        own = value
        if name in self.o.skip or (port != "out" and not self.o.inputs):
            return own
        value = np.asarray(value)
        if value.dtype == np.float64 and more.get("kind") != "schedule":
            value = value.astype(NUMPY[self.o.dtype])
        if value.ndim == 4:
            value = value.transpose(0, 3, 1, 2) if self.o.channels_first else value
            more["dims"] = (
                ("b c h w" if self.o.channels_first else "b h w c") if self.o.dims else None
            )
        if self.o.split_batch and value.ndim >= 2 and value.shape[0] == B and not more.get("kind"):
            for row in (1, 0):
                self._add(name, value[row : row + 1], port, **more)
            return own
        event = self._add(name, value, port, **more)
        found = self.injection.find(*event.id) if self.injection else None
        if found is None or self.injection is None:
            return own
        given = self.injection.read(found).astype(np.float64)
        return given.transpose(0, 2, 3, 1) if value.ndim == 4 and self.o.channels_first else given

    def _add(self, name: str, value: Any, port: str, **more: Any) -> Event:
        return self.writer.add(self.o.rename(name), value, slot=port, step=self.step, **more)

    def matmul(self, x: Any, w: Any) -> Any:
        if self.o.shuffle:
            order = self.order[self.order < x.shape[-1]]
            x, w = x[..., order], w[order]
        single = self.o.dtype in ("float32",)
        product = (x.astype(np.float32) @ w.astype(np.float32)) if single else x @ w
        return self.round(product)

    def norm(self, x: Any, block: int) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        if self._has("rms", block):
            centred = x
        divide = C - 1 if self._has("unbiased", block) else C
        eps = 1e-1 if self._has("eps", block) else 1e-6
        return self.round(centred / np.sqrt((centred**2).sum(-1, keepdims=True) / divide + eps))

    def _has(self, bug: str, block: int) -> bool:
        return self.o.bug == bug and block == 2

    def run(self) -> None:
        ids = np.array([[1, 2, 3, 4, 0], [5, 6, 7, 4, 0]], np.int32)
        if self.o.bug == "pad":
            ids[ids == 0] = 9
        self.put("pipeline/token_ids", ids, kind="ids")
        sigmas = np.linspace(1, 0, self.o.steps + 1)
        if self.o.bug == "shift":
            sigmas = 3 * sigmas / (1 + 2 * sigmas)
        self.put("pipeline/sigmas", sigmas, kind="schedule")
        x = self.round(self.noise + (0.5 if self.o.bug == "noise" else 0.0))
        self.put("pipeline/noise", x, kind="input")
        text = self.round(self.embedding[ids])
        text = self.put("text/embed", text)
        for step in range(self.o.steps):
            self.step = self.o.first_step + step
            velocity = self.network(x, text, sigmas[step])
            x = self.round(x + velocity * (sigmas[step + 1] - sigmas[step]))
            x = self.put("pipeline/latents", x)

    def network(self, x: Any, text: Any, sigma: float) -> Any:
        x = self.put("net", x, "in.0")
        time = self.round(
            np.concatenate([np.sin(sigma * np.arange(C // 2)), np.cos(sigma * np.arange(C // 2))])
        )
        self.put("net/time", np.broadcast_to(time, (B, C)))
        h = x.reshape(B, H * W, C) * self.o.scale
        for index, weights in enumerate(self.weights):
            h = self.block(h, text, time, weights, index)
        out = self.norm(h, -1).reshape(B, H, W, C)
        return self.put("net", out)

    def block(self, h: Any, text: Any, time: Any, w: dict[str, Any], index: int) -> Any:
        name = f"net/blocks.{index}"
        h = self.put(name, h, "in.0")
        table = self.matmul(time[None], w["ada"])
        shift, scale, gate = np.split(table, 3, axis=-1)
        if self._has("chunks", index):
            shift, scale = scale, shift
        self.put(f"{name}.ada", np.broadcast_to(table, (B, 3 * C)))
        normed = self.norm(self.put(f"{name}.norm", h, "in.0"), index)
        if self._has("stage", index):
            self.put(f"{name}.norm", h)
        else:
            normed = self.put(f"{name}.norm", normed)
        if self._has("skip-norm", index):
            normed = h
        modulated = self.round(normed * (1 + scale) + shift)
        h = self.round(h + self.attention(modulated, text, w, index) * gate)
        up = self.matmul(self.put(f"{name}.mlp", h, "in.0"), w["up"])
        up = self.put(f"{name}.mlp.up", up)
        act = self.round(_gelu(up, quick=self._has("gelu", index)))
        act = self.put(f"{name}.mlp.act", act)
        down = self.round(
            self.matmul(act, w["down"]) + (0 if self._has("bias", index) else w["bias"])
        )
        h = self.round(h + self.put(f"{name}.mlp", down))
        return self.put(name, h)

    def attention(self, x: Any, text: Any, w: dict[str, Any], index: int) -> Any:
        name = f"net/blocks.{index}.attn"
        x = self.put(name, x, "in.0")
        both = np.concatenate([x, text], axis=1)
        wv = w["v"].T if self._has("transpose", index) else w["v"]
        q, k, v = self.matmul(x, w["q"]), self.matmul(both, w["k"]), self.matmul(both, wv)
        if self._has("swap", index):
            k, v = v, k
        if self.o.fused:
            self.put(f"{name}.to_kv", np.concatenate([k, v], axis=-1))
            self.put(f"{name}.to_q", q)
        else:
            q, k, v = (
                self.put(f"{name}.to_{letter}", value)
                for letter, value in (("q", q), ("k", k), ("v", v))
            )
        qh, kh, vh = (_heads(each) for each in (q, k, v))
        root = 1.0 if self._has("root", index) else np.sqrt(C // HEADS)
        scores = np.einsum("bhid,bhjd->bhij", qh, kh) / root
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = self.round(weights / weights.sum(-1, keepdims=True))
        mixed = np.einsum("bhij,bhjd->bhid", weights, vh)
        merged = mixed.transpose(0, 2, 1, 3).reshape(x.shape)
        if self._has("merge", index):
            merged = mixed.reshape(x.shape)
        out = self.matmul(self.round(merged), w["o"])
        return self.put(name, out)


def _heads(x: Any) -> Any:
    return x.reshape(x.shape[0], x.shape[1], HEADS, -1).transpose(0, 2, 1, 3)


def _gelu(x: Any, *, quick: bool) -> Any:
    if quick:
        return x / (1 + np.exp(-1.702 * x))
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
