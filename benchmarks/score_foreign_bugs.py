"""Bugs planted in ports that others wrote: is the place right, is the cause named?

    PYTHONPATH=packages python benchmarks/score_foreign_bugs.py

The ports are those of score_foreign_ports.py: names, fused projections and axis orders are their
authors'. Everything is recorded, in float32, and compared with --floor and --checkpoint. A place
is right when the first wrong value is the one that the bug makes wrong; a cause when the first
finding is one of those listed with the bug.
"""

import argparse
import importlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from score_foreign_ports import (
    PORTS,
    record_mlx,
    record_torch,
    without_torchvision,
)  # imports lydite first

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import torch
import transformers

from lydite.diff.compare import compare
from lydite.diff.result import Verdict
from lydite.trace.reader import Trace

WEIGHTS = {"weights-differ", "weight-reordered", "weight-transposed", "another-parameter"}


@dataclass(frozen=True)
class Bug:
    """A change of a port, where it shows first, and the causes that name it."""

    port: str
    name: str
    apply: Callable[[Any], AbstractContextManager[Any] | None]
    place: str  # a pattern of the reference's site
    causes: set[str]


def change(setter: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A bug that changes the model once."""
    return lambda net: (setter(net), None)[1]


def block(net: Any, n: int) -> Any:
    return net.blocks[n]


def llama_module() -> Any:
    return importlib.import_module("mlx_lm.models.llama")


def tiled(q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, **_: Any) -> Any:
    n = q.shape[1] // k.shape[1]
    k, v = (mx.tile(x, (1, n, 1, 1)) for x in (k, v))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def unmasked(q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, **_: Any) -> Any:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)


def rotated(net: Any, **more: Any) -> None:
    for layer in net.model.layers:
        settings = {"dims": 16, "traditional": False, "base": 10000.0, **more}
        layer.self_attn.rope = nn.RoPE(**settings)


class Shifted(nn.Module):
    """Positions of keys that count from one."""

    def __call__(self, x: Any, offset: int = 0) -> Any:
        if x.shape[1] == 4:
            return mx.fast.rope(x, 16, traditional=False, base=10000.0, scale=1.0, offset=0)
        return mx.fast.rope(x, 16, traditional=False, base=10000.0, scale=1.0, offset=1)


class QueriesOnly(nn.Module):
    """A rotation of the first of two calls."""

    def __call__(self, x: Any, offset: int = 0) -> Any:
        if x.shape[1] == 2:
            return x
        return mx.fast.rope(x, 16, traditional=False, base=10000.0, scale=1.0, offset=0)


class Same(nn.Module):
    """No operation."""

    def __call__(self, x: Any, *_: Any) -> Any:
        return x


def forward(net: Any, run: Callable[..., Any]) -> None:
    """Another forward of one torch module."""
    net.forward = run.__get__(net)


def no_residual(self: Any, x: Any, **_: Any) -> Any:
    x = self.attn(self.norm1(x))
    return x + self.mlp(self.norm2(x))


def unjoined(self: Any, x: Any, **_: Any) -> Any:
    b, n, _c = x.shape
    q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
    x = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return self.proj(x.reshape(b, n, -1))


def token_last(self: Any, x: Any) -> Any:
    x = torch.cat((x, self.cls_token.expand(len(x), -1, -1)), 1)
    return x + self.pos_embed


def exchanged(weight: Any) -> None:
    q, k, v = weight.data.chunk(3)
    weight.data = torch.cat((q, v, k))


def bert_quick(x: Any) -> Any:
    return x * mx.sigmoid(1.702 * x)


def bert_layers(net: Any) -> Any:
    return net.encoder.layer


BUGS = (
    Bug("timm-vit", "GELU in its tanh form", change(
        lambda net: setattr(block(net, 1).mlp, "act", torch.nn.GELU(approximate="tanh"))),
        r"layers?\.1\..*(act|fc1|fc2|intermediate|output)", {"other-activation"}),
    Bug("timm-vit", "eps of a norm", change(lambda net: setattr(block(net, 0).norm1, "eps", 1e-2)),
        r"layers?\.0\.layernorm_before", {"other-norm"}),
    Bug("timm-vit", "no scale of attention", change(lambda net: vars(block(net, 1).attn).update(
        fused_attn=False, scale=1.0)),
        r"layers?\.1\.attention", {"attention-scale"}),
    Bug("timm-vit", "k and v exchanged", change(
        lambda net: exchanged(block(net, 2).attn.qkv.weight)),
        r"layers?\.2\.attention", WEIGHTS | {"qkv-exchanged", "parts-reordered", "another-value"}),
    Bug("timm-vit", "no table of positions", change(lambda net: net.pos_embed.data.zero_()),
        r"embeddings", WEIGHTS | {"positions-missing", "branch-missing"}),
    Bug("timm-vit", "class token at the end", change(lambda net: setattr(
        net, "_pos_embed", token_last.__get__(net))),
        r"embeddings|dropout|layers.0$", {"parts-reordered", "token-order", "shifted-positions"}),
    Bug("timm-vit", "no residual", change(lambda net: forward(block(net, 2), no_residual)),
        r"layers?\.2", {"residual-missing", "another-value", "branch-missing"}),
    Bug("timm-vit", "no bias of the patches", change(
        lambda net: net.patch_embed.proj.bias.data.zero_()),
        r"patch_embeddings", WEIGHTS | {"bias-missing", "shifted-per-channel"}),
    Bug("timm-vit", "kernel of the patches transposed", change(lambda net: setattr(
        net.patch_embed.proj.weight, "data", net.patch_embed.proj.weight.data.mT.contiguous())),
        r"patch_embeddings", WEIGHTS),
    Bug("timm-vit", "blue for red", change(lambda net: net.register_forward_pre_hook(
        lambda _, args: (args[0].flip(1),), prepend=True)),
        r"^net$|patch_embeddings", {"flipped", "inputs-differ"}),
    Bug("timm-vit", "heads not joined", change(lambda net: forward(block(net, 0).attn, unjoined)),
        r"layers?\.0\.attention", {"heads-merged-wrongly"}),
    Bug("timm-vit", "no last norm", change(lambda net: setattr(net, "norm", torch.nn.Identity())),
        r"layernorm$|^net$", {"another-value", "passed-through"}),
    Bug("llama", "base of the rotation", change(lambda net: rotated(net, base=1000000.0)),
        r"layers\.0\.self_attn", {"rotation-in-attention", "rotation-base"}),
    Bug("llama", "pairs of the rotation", change(lambda net: rotated(net, traditional=True)),
        r"layers\.0\.self_attn", {"rotation-in-attention", "rotation-pairs"}),
    Bug("llama", "no rotation", change(lambda net: [
        setattr(layer.self_attn, "rope", Same()) for layer in net.model.layers]),
        r"layers\.0\.self_attn", {"rotation-in-attention", "rotation-missing"}),
    Bug("llama", "rotation of queries only", change(lambda net: [
        setattr(layer.self_attn, "rope", QueriesOnly()) for layer in net.model.layers]),
        r"layers\.0\.self_attn", {"rotation-in-attention"}),
    Bug("llama", "positions from 1 for keys", change(lambda net: [
        setattr(layer.self_attn, "rope", Shifted()) for layer in net.model.layers]),
        r"layers\.0\.self_attn", {"rotation-in-attention"}),
    Bug("llama", "GELU for SiLU", lambda _: patch.object(
        llama_module(), "swiglu", lambda gate, x: nn.gelu(gate) * x),
        r"layers\.0\.mlp", {"other-activation"}),
    Bug("llama", "gate and up exchanged", lambda _: patch.object(
        llama_module(), "swiglu", lambda gate, x: nn.silu(x) * gate),
        r"layers\.0\.mlp", {"gate-exchanged"}),
    Bug("llama", "eps of RMS norms", change(lambda net: setattr(
        net.model.layers[1].input_layernorm, "eps", 1e-1)),
        r"layers\.1\.input_layernorm", {"other-norm"}),
    Bug("llama", "no causal mask", lambda _: patch.object(
        llama_module(), "scaled_dot_product_attention", unmasked),
        r"layers\.0\.self_attn", {"attention-mask", "mask-missing"}),
    Bug("llama", "heads of keys in turn", lambda _: patch.object(
        llama_module(), "scaled_dot_product_attention", tiled),
        r"layers\.0\.self_attn", {"heads-repeated-wrongly"}),
    Bug("llama", "a norm left out", change(lambda net: setattr(
        net.model.layers[1], "post_attention_layernorm", Same())),
        r"layers\.1\.(post_attention_layernorm|mlp)", {"another-value", "passed-through"}),
    Bug("llama", "a layer left out", change(lambda net: net.model.layers.pop(1)),
        r"layers\.1", {"another-value", "passed-through", *WEIGHTS}),
    Bug("bert", "quick GELU", change(lambda net: setattr(
        bert_layers(net)[1].intermediate, "intermediate_act_fn", bert_quick)),
        r"layer\.1\.", {"other-activation"}),
    Bug("bert", "no token types", change(lambda net: setattr(
        net.embeddings.token_type_embeddings, "weight",
        mx.zeros_like(net.embeddings.token_type_embeddings.weight))),
        r"embeddings", WEIGHTS | {"branch-missing"}),
    Bug("bert", "root of the whole width", lambda _: patch.object(
        importlib.import_module("mlx_embeddings.models.bert"), "math",
        SimpleNamespace(sqrt=lambda _: 8.0)),
        r"layer\.0\.attention", {"attention-scale"}),
    Bug("bert", "pooled at the last token", change(lambda net: setattr(
        net, "pooler", Last(net.pooler))),
        r"pooler|^net$", {"another-token"}),
)  # fmt: skip


class Last(nn.Module):
    """A pooler that takes the last token."""

    def __init__(self, pooler: Any) -> None:
        super().__init__()
        self.dense = pooler.dense

    def __call__(self, hidden_states: Any) -> Any:
        return mx.tanh(self.dense(hidden_states[:, -1]))


def judge(bug: Bug, root: Path) -> Verdict:
    """The verdict on a port with one bug."""
    port = PORTS[bug.port]()
    module = importlib.import_module(port.package)
    torch.manual_seed(0)
    reference = port.reference().eval()
    with torch.no_grad():  # biases begin as zeros, norms as ones: bugs in them would not show
        for parameter in reference.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    state = {name: value.clone().float() for name, value in reference.state_dict().items()}
    reference.save_pretrained(root / "model")  # pyright: ignore[reportCallIssue]
    for dtype in ("float32", "float64"):
        if not (root / dtype).exists():
            record_torch(reference, port.call_reference, root / dtype, dtype, ("*",), True)
    net = port.port(module, state)
    record = record_torch if isinstance(net, torch.nn.Module) else record_mlx
    with bug.apply(net) or nullcontext():
        record(net, port.call, root / "port", "float32", ("*",), True)
    with (
        Trace.open(root / "float32") as theirs,
        Trace.open(root / "port") as ours,
        Trace.open(root / "float64") as rounding,
    ):
        return compare(theirs, ours, floor=rounding, checkpoint=root / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="a part of the names of bugs")
    parser.add_argument("--verbose", action="store_true", help="print every sentence")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    without_torchvision()
    transformers.logging.disable_progress_bar()
    for bug in BUGS:
        if options.only not in f"{bug.port}: {bug.name}":
            continue
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(bug, Path(folder))
        site = verdict.site or verdict.verdict
        placed = verdict.verdict == "diverge" and bool(re.search(bug.place, site))
        first = verdict.findings[0].cause if verdict.findings else ""
        cause = "none" if not first else "named" if first in bug.causes else "wrong"
        counts.update(bugs=1, placed=placed, **{cause: 1})
        print(f"{'placed' if placed else 'ELSEWHERE'}  {cause:5}  {bug.port}: {bug.name}: "
              f"{site} [{verdict.slot}] {first}")  # fmt: skip
        if options.verbose:
            print(f"    {verdict.sentence}")
    print(
        f"{counts['bugs']} bugs: placed {counts['placed']}, cause named {counts['named']}, "
        f"wrong {counts['wrong']}, none {counts['none']}"
    )


if __name__ == "__main__":
    main()
