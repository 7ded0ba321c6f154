"""Attention computed again: heads, scales, caps, masks and windows, with torch on both sides."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Recorded
from support.findings import evidence

torch.manual_seed(1)
Q = torch.randn(2, 12, 48)
K, V = torch.randn(2, 12, 48), torch.randn(2, 12, 48)
POSITIONS = torch.arange(12)
BACK = POSITIONS[:, None] - POSITIONS[None]
CAUSAL = BACK >= 0
PADDED = POSITIONS[None] < torch.tensor([[12], [8]])
ANGLES = torch.outer(POSITIONS.float(), 10000 ** (-torch.arange(0, 8, 2) / 8))


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def attention(
    heads: int = 6,
    scale: float | None = None,
    cap: float | None = None,
    shown: torch.Tensor | None = None,
    parts: tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor:
    """(batch, heads, tokens, width of a head)."""
    q, k, v = parts or tuple(split(x, heads) for x in (Q, K, V))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores if shown is None else scores.masked_fill(~shown, -1e9)
    return scores.softmax(-1) @ v


def found(
    right: torch.Tensor, wrong: torch.Tensor, before: dict[str, torch.Tensor], name: str = "net/f"
) -> tuple[str, str]:
    """The first cause and its evidence; two empty texts where there is none."""
    values = [Recorded(path, value.numpy()) for path, value in before.items()]
    base = evidence(right.contiguous().numpy(), wrong.contiguous().numpy())
    e = type(base)(**{**vars(base), "name": name, "before": lambda: values})
    return next(((f.cause, f.evidence) for f in find(e)), ("", ""))


def given(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    """q, k and v as inputs of a function, the last first."""
    parts = {"query": split(Q, 6), "key": split(K, 6), "value": split(V, 6), **more}
    return {f"net/f [in.{name}]": value for name, value in reversed(parts.items())}


RECORDED = {"net/to_v": V, "net/to_k": K, "net/to_q": Q}


def inner(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 6)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (joined(attention(heads=4)), "split into 4 heads, not 6"),
        (joined(attention(parts=tuple(inner(x) for x in (Q, K, V)))), "inner axis of the width"),
        (attention().reshape(2, 12, 48), "joined without a transpose"),
        (attention().permute(0, 2, 3, 1).flatten(2), "joined with the heads as the inner axis"),
        (joined(attention(scale=6**-0.5)), "1/√(number of heads)"),
        (joined(attention(scale=1 / 8)), "a second scale"),
        (joined(attention(scale=0.171)), "a scale of 0.171, not 1/√8"),
        (joined(attention(cap=3.0)), "with a cap of 3 (softcap), which the reference does not"),
    ],
)
def test_heads_and_scales(wrong: torch.Tensor, says: str) -> None:
    assert says in found(joined(attention()), wrong, RECORDED, "net/out")[1]


WINDOW = CAUSAL & (BACK < 5) & PADDED[:, None, None]
MASKED = {"scale": 20**-0.5, "cap": 4.0, "shown": WINDOW}


@pytest.mark.parametrize(
    ("how", "cause", "says"),
    [
        ({"cap": None}, "score-cap", "without the cap of 4"),
        ({"cap": 9.0}, "score-cap", "with a cap of 9 (softcap), not 4"),
        ({"scale": 8**-0.5}, "attention-scale", "1/√(width of a head)"),
        ({"scale": 30**-0.5}, "attention-scale", "1/√30, not 1/√20"),
        ({"shown": None}, "attention-mask", "without the recorded mask"),
        ({"shown": ~WINDOW}, "attention-mask", "mask inverted"),
        ({"shown": WINDOW.mT}, "attention-mask", "mask transposed"),
        ({"shown": CAUSAL & (BACK < 6) & PADDED[:, None, None]}, "attention-mask",
         "a window of 6 keys, not 5"),
        ({"shown": CAUSAL & PADDED[:, None, None]}, "attention-mask", "without the window of 5"),
        ({"shown": CAUSAL & (BACK < 5)}, "attention-mask", "without the mask of padding"),
        ({"shown": (BACK < 5) & PADDED[:, None, None]}, "attention-mask", "the causal mask"),
        ({"shown": (BACK <= 0) & PADDED[:, None, None]}, "attention-mask",
         "a causal mask that is inverted"),
    ],
)  # fmt: skip
def test_caps_and_masks_of_a_function(how: dict[str, Any], cause: str, says: str) -> None:
    mask = torch.where(WINDOW, 0.0, torch.finfo(torch.float32).min)
    before = given(attention_mask=mask)
    # As transformers' eager attention returns it: tokens before heads.
    right, wrong = (attention(**h).transpose(1, 2) for h in (MASKED, {**MASKED, **how}))
    result = found(right, wrong, before)
    assert result[0] == cause and says in result[1]


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_parts_in_either_layout(layout: str) -> None:
    swap = layout == "tokens first"
    before = {n: x.transpose(1, 2) if swap else x for n, x in given().items()}
    right, wrong = attention(), attention(scale=1.0)
    if swap:
        right, wrong = right.transpose(1, 2), wrong.transpose(1, 2)
    assert found(right, wrong, before)[0] == "attention-scale"


def padded_to(keys: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.where(PADDED[:, :keys], 0.0, -10000.0).reshape(shape)


@pytest.mark.parametrize("shape", [(2, 12), (2, 1, 12), (2, 1, 1, 12)])
def test_a_padding_mask_in_any_shape(shape: tuple[int, ...]) -> None:
    before = {"net [in.mask]": padded_to(12, shape), **RECORDED}
    right = joined(attention(shown=PADDED[:, None, None]))
    scores = split(Q, 6) @ split(K, 6).mT * 8**-0.5
    minus_one = (scores - (~PADDED)[:, None, None].float()).softmax(-1) @ split(V, 6)
    for wrong, says in (
        (joined(attention()), "without the recorded mask"),
        (joined(attention(shown=~PADDED[:, None, None])), "mask inverted"),
        (joined(minus_one), "1 subtracted for a hidden key"),
        (joined(attention(shown=PADDED[[1, 0], None, None])), "of the batch backwards"),
    ):
        cause, text = found(right, wrong, before, "net/out")
        assert cause == "attention-mask" and says in text


def turned(x: torch.Tensor, sign: int = 1) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    pairs = torch.complex(a, b) * torch.polar(torch.ones_like(ANGLES), sign * ANGLES)
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((turned(split(Q, 6)), turned(split(K, 6)), turned(split(V, 6))), "with v rotated too"),
        ((turned(split(Q, 6)), split(K, 6), split(V, 6)), "with q rotated and k not"),
        ((turned(split(Q, 6), -1), turned(split(K, 6), -1), split(V, 6)), "negative angles"),
    ],
)
def test_rotations_of_a_function_that_takes_rotated_parts(
    parts: tuple[torch.Tensor, ...], says: str
) -> None:
    right = attention(parts=(turned(split(Q, 6)), turned(split(K, 6)), split(V, 6)))
    table = torch.cat((ANGLES, ANGLES), -1)[None]
    before = {
        **given(query=turned(split(Q, 6)), key=turned(split(K, 6))),
        "net/rope [out.1]": table.sin(),
        "net/rope": table.cos(),
        "net/q_proj": Q,
    }
    cause, text = found(right, attention(parts=parts), before)
    assert cause == "rotation-in-attention" and says in text
    del before["net/q_proj"]  # whether q was rotated is not known then
    assert found(right, attention(parts=parts), before)[0] != "rotation-in-attention"


def test_groups_of_heads_that_are_no_power_of_two() -> None:
    few = {"key": split(K[..., :16], 2), "value": split(V[..., :16], 2)}
    right = attention(parts=(split(Q, 6), *few.values()))
    wrong = attention(parts=(split(Q, 6), *(x.repeat(1, 3, 1, 1) for x in few.values())))
    assert found(right, wrong, given(**few))[0] == "heads-repeated-wrongly"


@pytest.mark.parametrize("left", [1e-2, 3e-3])
def test_an_attention_that_no_form_gives_is_not_fitted(left: float) -> None:
    right, noise = joined(attention()), torch.randn(2, 12, 48)
    for wrong in (joined(attention(scale=0.171)), joined(attention(heads=4))):
        size = left * wrong.norm() / noise.norm()
        assert found(right, wrong + size * noise, RECORDED, "net/out")[0] not in (
            "attention-scale",
            "heads-merged-wrongly",
            "score-cap",
        )


def linear(
    kernel: Any = torch.relu, heads: int = 6, eps: float = 1e-15, divisor: str = "sum"
) -> torch.Tensor:
    """Linear attention as Sana computes it, (batch, tokens, width)."""
    of_q, of_k = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    q, k, v = of_q(split(Q, heads)), of_k(split(K, heads)), split(V, heads)
    value = q @ (k.mT @ v)
    below = {"sum": q @ k.sum(2)[..., None] + eps, "length": 12, "none": 1}
    return joined(value / below[divisor])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (linear(torch.nn.functional.silu), "silu of q and k"),
        (linear((torch.relu, lambda x: x)), "no kernel of k"),
        (linear(divisor="none"), "without the denominator"),
        (linear(divisor="length"), "divided by the number of keys"),
        (linear(eps=1.0), "eps 1 in the denominator"),
        (linear(heads=4), "with 4 heads, not 6"),
        (joined(attention(parts=tuple(split(f, 6) for f in (Q.relu(), K.relu(), V)))),
         "softmax attention of relu(q)"),
    ],
)  # fmt: skip
def test_linear_attention(wrong: torch.Tensor, says: str) -> None:
    cause, text = found(linear(), wrong, RECORDED, "net/out")
    assert cause == "other-linear-attention" and says in text


def test_attention_with_softmax_is_not_taken_for_linear_attention() -> None:
    wrong = joined(attention()) + 0.01 * torch.randn(2, 12, 48)
    assert found(joined(attention()), wrong, RECORDED, "net/out")[0] != "other-linear-attention"
    assert found(linear(), linear() + 0.01 * V, RECORDED, "net/out")[0] != "other-linear-attention"


def test_what_attention_gives_of_another_q_is_no_cap() -> None:
    """A port in 16 bits that computes attention rightly, from a wrong q."""
    noise = torch.randn(Q.shape, generator=torch.Generator().manual_seed(3))
    q = split(Q + noise, 6)
    wrong = attention(parts=(q, split(K, 6), split(V, 6))).bfloat16()
    own = {"query": q, "key": split(K, 6), "value": split(V, 6)}
    values = [
        Recorded(path, value.numpy(), own[path[10:-1]].bfloat16().float().numpy)
        for path, value in given().items()
    ]
    base = evidence(attention().numpy(), wrong.float().numpy(), "bf16")
    e = replace(base, name="net/f", before=lambda: values)
    assert "score-cap" not in [finding.cause for finding in find(e)]
