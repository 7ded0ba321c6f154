"""A layer whose output alone the port records: the wrong operation before it is named."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Recorded
from support.findings import evidence

torch.manual_seed(0)
X, Y = torch.randn(2, 12, 16) + 0.3, torch.randn(2, 12, 16)
WIDE = torch.randn(2, 12, 32)
PICTURE, SMALL = torch.randn(2, 8, 10, 10), torch.randn(2, 8, 5, 5)
WEIGHT, BIAS = torch.randn(24, 16), torch.randn(24)
KERNEL, OFFSET = torch.randn(8, 8, 3, 3), torch.randn(8)
Q, K, V = (torch.randn(2, 12, 16) for _ in range(3))


def linear(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, WEIGHT, BIAS)


def convolution(x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, KERNEL, OFFSET, padding=1)


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (16,)) * (1 + Y[:, :1]) + Y[:, 1:2]


def attention(scale: float | None = None) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (Q, K, V))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def enlarged(mode: str) -> torch.Tensor:
    return F.interpolate(SMALL, scale_factor=2, mode=mode)


QKV = {"net/attn.to_q": Q, "net/attn.to_k": K, "net/attn.to_v": V}
Layer = Callable[[torch.Tensor], torch.Tensor]


def causes(
    layer: Layer, right: torch.Tensor, wrong: torch.Tensor, named: dict[str, torch.Tensor]
) -> list[str]:
    """What is found at the output of a layer whose input only the reference recorded."""
    parameters = (WEIGHT, BIAS) if layer is linear else (KERNEL, OFFSET)
    parameters = () if layer is norm else parameters
    values = [Recorded("net/attn.m [in.0]", right.numpy())]
    values += [Recorded(name, value.numpy()) for name, value in named.items()]
    base = evidence(layer(right).numpy(), layer(wrong).numpy())
    known = dict(zip(("weight", "bias"), (p.double().numpy() for p in parameters), strict=False))
    changed = {"name": "net/attn.m", "before": lambda: values, "parameters": lambda: known}
    return [finding.cause for finding in find(type(base)(**{**vars(base), **changed}))]


@pytest.mark.parametrize(
    ("layer", "right", "wrong", "named", "cause"),
    [
        (linear, F.silu(X), F.gelu(X), {"net/x": X}, "other-activation"),
        (linear, F.silu(X), F.silu(Y), {"net/x": X, "net/y": Y}, "another-input"),
        (linear, attention(), attention(1.0), QKV, "attention-scale"),
        (linear, X, X.flip(0), {}, "input-rearranged"),
        (linear, X, X.roll(1, 1), {}, "input-rearranged"),
        (linear, X / 0.36 + 0.11, (X + 0.11) / 0.36, {"net/x": X}, "input-scaled"),
        (linear, X + Y, X, {"net/x": X, "net/y": Y}, "residual-missing"),
        (linear, X + Y, X - Y, {"net/x": X, "net/y": Y}, "other-sum"),
        (
            linear,
            F.silu(WIDE[..., :16]) * WIDE[..., 16:],
            F.silu(WIDE[..., 16:]) * WIDE[..., :16],
            {"net/wide": WIDE},
            "gate-exchanged",
        ),
        (
            linear,
            torch.cat((X[..., :8], Y[..., :8]), -1),
            torch.cat((Y[..., :8], X[..., :8]), -1),
            {"net/x": X[..., :8], "net/y": Y[..., :8]},
            "parts-reordered",
        ),
        (convolution, enlarged("nearest"), enlarged("bilinear"), {"net/x": SMALL}, "other-resize"),
        (convolution, F.silu(PICTURE), PICTURE, {"net/x": PICTURE}, "other-activation"),
        (norm, X + Y, X, {"net/x": X, "net/y": Y}, "residual-missing"),
    ],
)
def test_the_operation_before_the_layer_is_named(
    layer: Layer,
    right: torch.Tensor,
    wrong: torch.Tensor,
    named: dict[str, torch.Tensor],
    cause: str,
) -> None:
    assert causes(layer, right, wrong, named)[:1] == [cause]


@pytest.mark.parametrize(
    ("taken", "cause"),
    [({}, "positions-missing"), ({"net/attn [in.0]": WIDE[:1]}, "branch-missing")],
)
def test_what_a_module_makes_of_tokens_is_no_table_of_positions(
    taken: dict[str, torch.Tensor], cause: str
) -> None:
    x, y = X[:1], Y[:1]
    named = {"net/attn": y, **taken, "net/x": x}
    assert causes(linear, x + y, x, named)[:1] == [cause]


def test_parts_of_unequal_width_joined_in_another_order() -> None:
    parts = torch.randn(2, 12, 8), torch.randn(2, 12, 32)
    right, wrong = (torch.cat(order, -1) for order in (parts, parts[::-1]))
    weight = torch.randn(24, 40)
    e = evidence(F.linear(right, weight).numpy(), F.linear(wrong, weight).numpy())
    values = [Recorded("m [in.0]", right.numpy())]
    known = {"weight": weight.double().numpy()}
    e = replace(e, before=lambda: values, parameters=lambda: known)
    (finding,) = find(e)
    assert "joined in another order" in finding.evidence


def test_an_input_that_the_port_recorded() -> None:
    right, wrong = F.silu(X), X
    e = evidence(
        linear(right).numpy(),
        linear(wrong).numpy(),
        inputs={"in.0": (right.numpy(), wrong.numpy())},
    )
    known = {"weight": WEIGHT.double().numpy(), "bias": BIAS.double().numpy()}
    e = replace(e, before=lambda: [Recorded("net/x", X.numpy())], parameters=lambda: known)
    assert find(e)[0].cause == "other-activation"


@pytest.mark.parametrize("layer", [linear, norm])
def test_an_input_that_follows_from_nothing_recorded_names_nothing(layer: Layer) -> None:
    draw = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 12, 16))).float()
    assert not causes(layer, X, X * draw, {"net/x": X, "net/y": Y})


TABLE, SIX = torch.randn(2, 6 * 16), torch.randn(6, 16)
CHUNKS = (TABLE.unflatten(-1, (6, 16)) + SIX).unbind(1)
INNER = (TABLE.unflatten(-1, (16, 6)).mT + SIX).unbind(1)
OF_NEXT_BLOCK = (TABLE.unflatten(-1, (6, 16)) + SIX.flip(0)).unbind(1)


def modulated(
    scale: int = 1, shift: int = 0, one: float = 1.0, chunks: tuple[torch.Tensor, ...] = CHUNKS
) -> torch.Tensor:
    return X * (one + chunks[scale][:, None]) + chunks[shift][:, None]


def at_output(
    right: torch.Tensor, wrong: torch.Tensor, layer: Layer, before: dict[str, torch.Tensor]
) -> tuple[str, str]:
    """The first cause at the output of a layer in a block with a table as a parameter."""
    values = [Recorded("net/b.0.attn.m [in.0]", right.numpy())]
    values += [Recorded(name, value.numpy()) for name, value in before.items()]
    tables = {"net/b.0.scale_shift_table": SIX, "net/b.1.scale_shift_table": SIX.flip(0)}
    parameters = {"weight": WEIGHT, "bias": BIAS} if layer is linear else {
        "weight": torch.eye(16)[:, :, None, None]
    }  # fmt: skip
    base = evidence(layer(right).numpy(), layer(wrong).numpy())
    e = replace(
        base,
        name="net/b.0.attn.m",
        before=lambda: values,
        parameters=lambda: {n: p.double().numpy() for n, p in parameters.items()},
        parameters_like=lambda s: [(n, t.numpy()) for n, t in tables.items() if t.shape == s],
    )
    return next(((f.cause, f.evidence) for f in find(e)), ("", ""))


@pytest.mark.parametrize("form", ["tokens", "picture"])
@pytest.mark.parametrize(
    ("wrong", "cause", "says"),
    [
        (modulated(0, 1), "scale-shift-exchanged", "· (1 + chunk 0) + chunk 1"),
        (modulated(4, 3), "other-chunks", "· (1 + chunk 4) + chunk 3"),
        (modulated(one=0.0), "one-plus-missing", "· chunk 1 + chunk 0"),
        (modulated(chunks=TABLE[:, None].unflatten(-1, (6, 16))[:, 0].unbind(1)), "other-chunks",
         "with the chunks of net/ada,"),
        (modulated(chunks=INNER), "other-chunks", "as the inner axis"),
        (modulated(chunks=OF_NEXT_BLOCK), "other-chunks",
         "another layer or block, number 1, not 0"),
    ],
)  # fmt: skip
def test_an_input_modulated_with_a_table_and_a_parameter(
    wrong: torch.Tensor, cause: str, says: str, form: str
) -> None:
    def pictured(x: torch.Tensor) -> torch.Tensor:
        return x.mT.unflatten(-1, (3, 4)).contiguous()

    right, before = modulated(), {"net/b.0.norm": X, "net/ada": TABLE}
    if form == "picture":
        result = at_output(pictured(right), pictured(wrong), lambda x: x, before)
    else:
        result = at_output(right, wrong, linear, before)
    assert result[0] == cause and says in result[1]


def test_an_input_that_is_no_modulation_of_the_norm_names_no_chunks() -> None:
    wrong = modulated(4, 3) + 0.01 * Y
    cause, _ = at_output(modulated(), wrong, linear, {"net/b.0.norm": X, "net/ada": TABLE})
    assert cause not in ("other-chunks", "scale-shift-exchanged", "one-plus-missing")


@pytest.mark.parametrize(
    ("gate", "cause"),
    [
        (torch.ones(2, 16), "gate-missing"),
        (CHUNKS[5], "other-gate"),
        (CHUNKS[2].tanh(), "other-gate"),
    ],
)
def test_a_gate_before_a_layer(gate: torch.Tensor, cause: str) -> None:
    right, wrong = (X + g[:, None] * Y for g in (CHUNKS[2], gate))
    before = {"net/b.0.attn1": Y, "net/b.0.norm [in.0]": X, "net/ada": TABLE}
    assert at_output(right, wrong, linear, before)[0] == cause


def test_q_k_and_v_as_one_layer_in_another_order() -> None:
    weights = {part: torch.randn(16, 16) for part in "qkv"}
    right, wrong = (
        torch.cat([F.linear(X, weights[part]) for part in order], -1) for order in ("qkv", "kqv")
    )
    named = [(f"net/attn.to_{part}.weight", w.double().numpy()) for part, w in weights.items()]
    e = replace(
        evidence(right.numpy(), wrong.numpy()),
        name="net/attn.to_q",
        before=lambda: [Recorded("net/attn.to_q [in.0]", X.numpy())],
        parameters=lambda: {"weight": named[0][1]},
        parameters_like=lambda shape: [n for n in named[1:] if n[1].shape == shape],
    )
    finding = find(e)[0]
    assert finding.cause == "qkv-exchanged" and "in the order k, q, v" in finding.evidence


@pytest.mark.parametrize(
    ("layer", "right", "wrong", "named", "cause"),
    [
        (norm, X, X + Y, {"net/x": X, "net/y": Y}, "sum-too-early"),
        (linear, X, F.layer_norm(X, (16,)), {"net/x": X}, "norm-extra"),
        (linear, K, torch.cat((K, V), -1).unflatten(-1, (4, 2, 4))[..., 0, :].flatten(2),
         {"net/attn.to_v": V, "net/attn.to_k": K}, "other-split"),
        (convolution, F.silu(PICTURE) * PICTURE.flip(1), F.silu(PICTURE.flip(1)) * PICTURE,
         {"net/x": torch.cat((PICTURE, PICTURE.flip(1)), 1)}, "gate-exchanged"),
    ],
)  # fmt: skip
def test_operations_at_the_wrong_place_before_the_layer(
    layer: Layer, right: torch.Tensor, wrong: torch.Tensor, named: dict[str, torch.Tensor],
    cause: str,
) -> None:  # fmt: skip
    assert causes(layer, right, wrong, named)[:1] == [cause]
