"""Variant replay: the cause is named with torch's own operations on both sides, or not at all."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_timestep_embedding

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Recorded
from support.findings import evidence

torch.manual_seed(0)
X = torch.randn(2, 12, 32)
MEAN = X + 1.5
Y = torch.randn(2, 12, 32)
TABLE = torch.randn(2, 6 * 32)
CHUNKS = [chunk[:, None] for chunk in TABLE.chunk(6, -1)]
WEIGHT, BIAS = torch.rand(32) + 0.5, torch.randn(32)
Q, K, V = (torch.randn(2, 12, 32) for _ in range(3))
NAMED = {"net/x": X, "net/y": Y, "net/ada": TABLE}
QKV = {"net/attn.to_q": Q, "net/attn.to_k": K, "net/attn.to_v": V}


def found(
    right: torch.Tensor,
    wrong: torch.Tensor,
    before: dict[str, torch.Tensor],
    *,
    name: str = "m",
    slot: str = "out",
    given: torch.Tensor | None = None,
) -> list[str]:
    """The first cause and its evidence."""
    inputs = {} if given is None else {"in.0": (given.numpy(), given.numpy())}
    base = evidence(right.numpy(), wrong.numpy(), inputs=inputs)
    values = [Recorded(path, value.numpy()) for path, value in before.items()]
    e = type(base)(**{**vars(base), "name": name, "slot": slot, "before": lambda: values})
    return [text for finding in find(e)[:1] for text in (finding.cause, finding.evidence)]


def heads(x: torch.Tensor, n: int = 4) -> torch.Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def attention(q: torch.Tensor = Q, k: torch.Tensor = K, v: torch.Tensor = V, **how: Any) -> Any:
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), **how)
    return y.transpose(1, 2).flatten(2)


def rms(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (32,), WEIGHT, eps=1e-6)


def layer(x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return F.layer_norm(x, (32,), WEIGHT, BIAS, eps)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu with tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "no activation": lambda x: x,
}


@pytest.mark.parametrize("right", [name for name in ACTIVATIONS if name != "no activation"])
@pytest.mark.parametrize("wrong", ACTIVATIONS)
def test_activations(right: str, wrong: str) -> None:
    result = found(ACTIVATIONS[right](X), ACTIVATIONS[wrong](X), {"net/x": X})
    if right == wrong:
        assert not result
    else:
        assert result[0] == "other-activation"
        assert f"port applies {wrong} to net/x, the reference applies {right};" in result[1]


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (layer(0.01 * X), layer(0.01 * X, 1e-6), "layer norm with eps 1e-06"),
        (layer(MEAN), rms(MEAN) + BIAS, "a RMS norm"),
        (rms(MEAN), layer(MEAN) - BIAS, "a layer norm"),
        (layer(MEAN), (MEAN - MEAN.mean(-1, True)) / MEAN.std(-1, keepdim=True) * WEIGHT + BIAS,
         "n − 1 as divisor"),
    ],
)  # fmt: skip
def test_norms(right: torch.Tensor, wrong: torch.Tensor, says: str) -> None:
    given = 0.01 * X if "eps" in says else MEAN
    result = found(right, wrong, {}, given=given)
    assert result[0] == "other-norm" and says in result[1]


RIGHT = X * (1 + CHUNKS[1]) + CHUNKS[0]


@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        (RIGHT, X * CHUNKS[1] + CHUNKS[0], "one-plus-missing"),
        (RIGHT, X * (1 + CHUNKS[0]) + CHUNKS[1], "scale-shift-exchanged"),
        (RIGHT, X * (1 + CHUNKS[4]) + CHUNKS[3], "other-chunks"),
        (X + CHUNKS[2] * Y, X + Y, "gate-missing"),
        (X + CHUNKS[2] * Y, X + CHUNKS[5] * Y, "other-gate"),
        (X + CHUNKS[2] * Y, CHUNKS[2] * Y, "residual-missing"),
        (X + 0.25 * Y, X - 0.25 * Y, "term-negated"),
        (4 * X - 3 * Y, 4 * Y - 3 * X, "terms-exchanged"),
        (4 * X - 3 * Y, 5 * X - 4 * Y, "other-factors"),
        (4 * X - 3 * Y, 8 * X - 6 * Y, "scaled"),
    ],
)
def test_sums_of_recorded_values(right: torch.Tensor, wrong: torch.Tensor, cause: str) -> None:
    assert found(right, wrong, NAMED)[0] == cause


def test_a_value_is_not_modulated_from_itself_under_another_name() -> None:
    """Nor from another value of the block, where one of its norms explains both sides."""
    wrong = X * (1 + CHUNKS[4]) + CHUNKS[3]
    before = {"net/b.out": RIGHT, "net/b.first": wrong, **NAMED}
    cause, text = found(RIGHT, wrong, before, name="net/b.attn", slot="in.0")
    assert cause == "other-chunks" and "(1 + chunk 4) + chunk 3" in text


CAUSAL = attention(is_causal=True)


@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        (attention(), attention(scale=1.0), "attention-scale"),
        (attention(), attention(scale=32**-0.5), "attention-scale"),
        (CAUSAL, attention(), "attention-mask"),
        (attention(), CAUSAL, "attention-mask"),
        (attention(), attention(k=V, v=K), "qkv-exchanged"),
        (attention(), heads(attention()).reshape(2, 12, 32), "heads-merged-wrongly"),
    ],
)  # fmt: skip
def test_attention(right: torch.Tensor, wrong: torch.Tensor, cause: str) -> None:
    assert found(right, wrong, QKV, name="net/attn.to_out")[0] == cause


TEXT = [torch.randn(2, 5, 32) for _ in range(3)]
JOINT = {**QKV, **{f"net/attn.add_{part}_proj": x for part, x in zip("qkv", TEXT, strict=True)}}
WHOLE, REVERSED = (
    attention(*(torch.cat(parts, 1) for parts in zip(*streams, strict=True)))
    for streams in (((Q, K, V), TEXT), (TEXT, (Q, K, V)))
)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (WHOLE[:, :12], attention(), "in its own stream only"),
        (WHOLE[:, 12:], attention(*TEXT), "in its own stream only"),
        (WHOLE[:, :12], WHOLE[:, 5:], "cut from the other end"),
        (WHOLE[:, 12:], WHOLE[:, :5], "cut from the other end"),
        (WHOLE[:, :12], REVERSED[:, :12], "joined in the other order"),
    ],
)
def test_attention_of_two_streams(right: torch.Tensor, wrong: torch.Tensor, says: str) -> None:
    cause, text = found(right, wrong, JOINT, name="net/attn.to_out")
    assert cause == ("attention-mask" if "only" in says else "streams-cut-wrongly") and says in text


def of_two_heads(name: str, x: torch.Tensor) -> torch.Tensor:
    few = x[..., :16].unflatten(-1, (2, 8))
    return (few.repeat_interleave(2, -2) if name == "repeated" else few.repeat(1, 1, 2, 1)).flatten(
        -2
    )


PADDED = torch.arange(12)[None] < torch.tensor([[12], [7]])
NORMED = {**QKV, "net/attn.norm_q": rms(Q), "net/attn.norm_k": rms(K)}
FEW = {**QKV, "net/attn.to_k": K[..., :16], "net/attn.to_v": V[..., :16]}
POSITIONS = torch.randn(12, 12, 4)  # (queries, keys, heads), as T5 computes it
ADDED = POSITIONS.permute(2, 0, 1)[None]
HIDDEN = torch.where(PADDED[:, None, None], 0.0, -1e9)
T5 = {"net/attn.relative": POSITIONS, **QKV}
BOTH = {"net/attn.bias": ADDED + HIDDEN, **QKV}
MASK = torch.cat([PADDED[:, 5:], torch.ones(2, 5, dtype=torch.bool)], 1)[:, None, None]
STREAMS = {"net/text": torch.randn(2, 5, 8), "net/mask": MASK.float(), **QKV}
REPEATED, IN_TURN = (
    attention(Q, *(of_two_heads(name, x) for x in (K, V))) for name in ("repeated", "in turn")
)


@pytest.mark.parametrize(
    ("right", "wrong", "before", "says"),
    [
        (attention(rms(Q), rms(K)), attention(), NORMED, "without the norms of q and k"),
        (REPEATED, IN_TURN, FEW, "repeated in turn"),
        (attention(attn_mask=ADDED, scale=1.0), attention(scale=1.0), T5,
         "without the recorded bias"),
        (attention(attn_mask=ADDED, scale=1.0), attention(attn_mask=-ADDED, scale=1.0), T5,
         "bias subtracted"),
        (attention(attn_mask=ADDED + HIDDEN), attention(attn_mask=HIDDEN), BOTH,
         "without the recorded bias"),
        (attention(attn_mask=ADDED + HIDDEN), attention(attn_mask=ADDED), BOTH,
         "without the recorded mask"),
        (attention(attn_mask=MASK), attention(attn_mask=MASK.roll(5, -1)), STREAMS,
         "mask of its streams in the other order"),
    ],
)  # fmt: skip
def test_attention_with_norms_groups_and_biases(
    right: torch.Tensor, wrong: torch.Tensor, before: dict[str, torch.Tensor], says: str
) -> None:
    assert says in found(right, wrong, before, name="net/attn.to_out")[1]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"flip_sin_to_cos": False}, "sines first"),
        ({"downscale_freq_shift": 1}, "frequency shift 1"),
        ({"max_period": 1000}, "period 1000"),
        ({"scale": 0.001}, "time times 0.001"),
    ],
)
def test_sinusoids(how: dict[str, Any], says: str) -> None:
    time = torch.tensor([703.0, 12.0])
    usual: dict[str, Any] = {"flip_sin_to_cos": True, "downscale_freq_shift": 0}
    right, wrong = (get_timestep_embedding(time, 64, **{**usual, **more}) for more in ({}, how))
    cause, text = found(right, wrong, {"net/t": time})
    assert cause == "other-sinusoid" and says in text.partition(", the reference")[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("what", ["angles", "frequencies"])
def test_sinusoids_of_rounded_angles(what: str, dtype: torch.dtype) -> None:
    time = torch.tensor([703.25, 12.0])
    rates = 10000 ** (-torch.arange(32) / 32)
    low = rates.to(dtype).float() if what == "frequencies" else rates
    angles = time[:, None] * low
    angles = angles.to(dtype).float() if what == "angles" else angles
    right, wrong = (
        torch.cat((x.cos(), x.sin()), -1) for x in (time[:, None] * rates, angles)
    )  # fmt: skip
    cause, text = found(right, wrong, {"net/t": time})
    assert cause == "sinusoid-rounded" and f"{what} rounded to {str(dtype)[6:]}" in text


@pytest.mark.parametrize("seed", range(6))
def test_a_value_computed_from_something_else_names_no_variant(seed: int) -> None:
    torch.manual_seed(seed)
    other = torch.randn(2, 12, 32)
    before = {**NAMED, **QKV}
    replayed = {
        *("other-activation", "other-norm", "other-gate", "gate-missing", "other-factors"),
        *("attention-scale", "attention-mask", "one-plus-missing", "other-sinusoid"),
    }
    for right in (F.gelu(X), RIGHT, X + CHUNKS[2] * Y, attention(), layer(X)):
        for wrong in (F.gelu(other), right + 0.1 * other, right @ torch.randn(32, 32)):
            result = found(right, wrong, before, name="net/attn.to_out", given=X)
            assert not result or result[0] not in replayed


GIVEN = {
    f"f [in.{part}]": heads(x) for part, x in (("value", V), ("key", K), ("query", Q))
}  # the last first


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (attention(scale=8**-1), "attention-scale"),
        (attention(is_causal=True), "attention-mask"),
        (attention(q=K, k=Q), "qkv-exchanged"),
    ],
)
def test_attention_recorded_as_a_function(wrong: torch.Tensor, cause: str) -> None:
    result = found(heads(attention()), heads(wrong), GIVEN, name="f")
    assert result[:1] == [cause]


ONES = torch.outer(*([torch.tensor([1.0] * 8 + [0.0] * 4)] * 2)).expand(2, 1, 12, 12)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (attention(attn_mask=ONES > 0), "are seen, and zero for queries that see none;"),
        (attention(attn_mask=(ONES > 0).any(-2, keepdim=True)), "are seen, for keys alone"),
        (attention(), "without the mask of zeros and ones"),
        (attention(attn_mask=1 - ONES), "inverted"),
        (attention(attn_mask=ONES.amax(-2, keepdim=True)), "for keys alone"),
        (attention(attn_mask=ONES, scale=1.0), "without a scale"),
    ],
)
def test_a_mask_of_zeros_and_ones_that_the_reference_adds(wrong: torch.Tensor, says: str) -> None:
    before = {"f [in.attn_mask]": ONES, **GIVEN}
    result = found(heads(attention(attn_mask=ONES)), heads(wrong), before, name="f")
    assert result[0] in ("attention-mask", "attention-scale") and says in result[1], result


def seen_attention(shown: torch.Tensor, hidden: float = -1e30, empty: float = 0.0) -> torch.Tensor:
    """Queries that see no key give zero, or the mean."""
    scores = torch.where(shown, heads(Q) @ heads(K).mT * 8**-0.5, hidden).double()
    kept = torch.where(shown.any(-1, keepdim=True), 1.0, empty)
    return (scores.softmax(-1) * kept @ heads(V).double()).float()


LEFT_PADDED = torch.ones(12, 12).tril().bool() & (torch.arange(12) >= 3)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(
    ("variant", "says"),
    [
        ({}, "for queries that see no key"),
        ({"hidden": 0.0, "empty": 1.0}, "hides set to 0, not −infinity"),
        ({"shown": LEFT_PADDED.triu(-2)}, "with a window of 3 keys"),
    ],
)
def test_queries_that_see_no_key(variant: dict[str, Any], says: str, zero: bool) -> None:
    shown = LEFT_PADDED.expand(2, 1, 12, 12)
    before = {"f [in.attn_mask]": shown.float(), **GIVEN}
    right = seen_attention(shown, empty=0.0 if zero else 1.0)
    other = {"empty": 1.0 if zero == (not variant) else 0.0, "shown": shown, **variant}
    result = found(right, seen_attention(**other), before, name="f")
    assert result[0] == "attention-mask" and says in result[1], result


def test_scores_in_16_bits_where_some_queries_see_no_key() -> None:
    shown = LEFT_PADDED.expand(2, 1, 12, 12)
    before = {"f [in.attn_mask]": shown.float(), **GIVEN}
    scores = (heads(Q) @ heads(K).mT * 8**-0.5).half().float()
    scores = torch.where(shown, scores, -1e30).double().softmax(-1) * shown.any(-1, keepdim=True)
    result = found(seen_attention(shown), (scores @ heads(V).double()).float(), before, name="f")
    assert "scores in float16" in result[1], result


def test_a_padding_mask_that_is_not_used() -> None:
    mask = PADDED[:, None, None]
    before = {"f [in.attn_mask]": mask.float(), **GIVEN}
    right = attention(attn_mask=mask)
    assert (
        "without the recorded mask" in found(heads(right), heads(attention()), before, name="f")[1]
    )
    late = (heads(Q) @ heads(K).mT * 8**-0.5).softmax(-1) * mask @ heads(V)
    assert "after the softmax" in found(heads(right), late, before, name="f")[1]


def turned(x: torch.Tensor, rows: int = 3, start: int = 0, base: float = 1e4) -> torch.Tensor:
    """Rotated by rows and columns of a grid, eight pairs each."""
    rates = base ** (-torch.arange(8) / 8)
    y, z = torch.meshgrid(torch.arange(rows), torch.arange(12 // rows), indexing="ij")
    angles = torch.cat([(p.flatten() + start)[:, None] * rates for p in (y, z)], -1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [(turned(X, start=-1), "rotation-offset"), (turned(X, base=1e3), "rotation-base")],
)
def test_rotations_of_two_axes(wrong: torch.Tensor, cause: str) -> None:
    assert found(turned(X), wrong, NAMED)[:1] == [cause]


def test_tokens_that_are_rotated_with_the_angles_of_others() -> None:
    order = torch.tensor([3, 0, 2, 1, *range(4, 12)])
    cause, text = found(turned(X), turned(X[:, order])[:, order.argsort()], NAMED)
    assert cause == "rotation-positions" and "token 0 with those of token 1." in text


@pytest.mark.parametrize("rows", [1, 12])
def test_the_base_of_a_rotation_whose_fast_angles_wrap(rows: int) -> None:
    cause, text = found(turned(X, rows), turned(X, rows, base=1e3), NAMED)
    assert cause == "rotation-base"
    assert "axis of 16 numbers its base is 1000, the reference's 1e+04" in text


def test_rows_of_a_batch_with_positions_of_their_own() -> None:
    order = torch.tensor([0, 0, 0, *range(9)])
    angles = torch.outer(torch.arange(12.0), 1e4 ** (-torch.arange(8) / 8))

    def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    split = X.unflatten(-1, (2, 16))  # batch, tokens, heads, width
    right = torch.stack([rotated(row, angles) for row in split])
    wrong = torch.stack([right[0], rotated(split[1], angles[order])])
    cause, text = found(right, wrong, {"net/x": split})
    assert cause == "rotation-positions" and "in row 1, token 1 with those of token 0" in text


TOKENS = torch.randn(2, 12, 2, 32)  # (batch, tokens, heads, width)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (F.layer_norm(TOKENS, (32,), WEIGHT), "The port is a layer norm"),
        (F.rms_norm(TOKENS, (32,), WEIGHT, 1e-3), "RMS norm with eps 0.001"),
        (TOKENS, "without the norm"),
    ],
)
def test_a_norm_before_a_rotation_that_the_port_does_not_record(
    wrong: torch.Tensor, says: str, heads_first: bool
) -> None:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        y = torch.stack([turned(head, 3) for head in x.unbind(2)], 2)
        return y.transpose(1, 2) if heads_first else y

    before = {
        "net/attn.norm_q": rms(TOKENS),
        "net/attn.norm_q [in.0]": TOKENS,
        "net/attn.to_q": TOKENS.flatten(2),
    }
    result = found(rotated(rms(TOKENS)), rotated(wrong), before, name="net/attn.f")
    assert "Before the rotation, at net/attn.norm_q: " in result[1] and says in result[1], result


def test_a_norm_of_one_of_two_streams_before_a_rotation() -> None:
    text, image = TOKENS[:, :4], TOKENS[:, 4:]

    def rotated(*streams: torch.Tensor) -> torch.Tensor:
        joined = torch.cat(streams, 1)
        return torch.stack([turned(head, 3) for head in joined.unbind(2)], 2)

    before = {
        "net/norm_q": rms(image),
        "net/norm_q [in.0]": image,
        "net/norm_added_q": rms(text),
        "net/norm_added_q [in.0]": text,
    }
    right = rotated(rms(text), rms(image))
    result = found(right, rotated(rms(text), image), before, name="net/f")
    assert result[0] == "qk-norm-missing" and "at net/norm_q: " in result[1], result


def test_a_norm_of_another_value() -> None:
    before = {"net/x": X, "net/y": Y}
    base = evidence(layer(X).numpy(), layer(Y).numpy(), inputs={"in.0": (X.numpy(), X.numpy())})
    values = [Recorded(path, value.numpy()) for path, value in before.items()]
    parameters = {"weight": WEIGHT.double().numpy(), "bias": BIAS.double().numpy()}
    e = replace(base, before=lambda: values, parameters=lambda: parameters)
    (finding, *_) = find(e)
    assert finding.cause == "another-input"
    assert "The port is this norm of net/y, the reference of m [in.0]" in finding.evidence


def test_which_term_of_a_sum_is_another_value() -> None:
    """The residual is the older term, the branch the one that was computed last."""
    other = torch.randn(2, 12, 32)
    before = {"net/branch": Y, "net/norm": other, "net/stream": X}  # the last first
    residual = found(X + Y, other + Y, before)
    assert residual[0] == "other-sum" and "its residual is net/norm, not net/stream" in residual[1]
    branch = found(X + Y, X + other, before)
    assert branch[0] == "other-sum" and "its branch is net/norm, not net/branch" in branch[1]
    small = {name: value[:, :1] for name, value in before.items()}  # of a picture's shape
    residual = found((X + Y)[:, :1], (other + Y)[:, :1], small)
    assert "its residual is net/norm, not net/stream" in residual[1]


def guided(prompt: torch.Tensor, other: torch.Tensor, weight: float = 4.0) -> torch.Tensor:
    return other + weight * (prompt - other)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (guided(X, Y), "does not rescale"),
        (guided(X, Y) * X.norm() / guided(X, Y).norm(), "over all axes"),
        (guided(X, Y) * Y.norm(dim=-1, keepdim=True) / guided(X, Y).norm(dim=-1, keepdim=True),
         "to the norm of net/y"),
    ],
)  # fmt: skip
def test_guidance_with_a_rescaled_norm(wrong: torch.Tensor, words: str) -> None:
    joined = guided(X, Y)
    right = joined * X.norm(dim=-1, keepdim=True) / joined.norm(dim=-1, keepdim=True)
    result = found(right, wrong, {"net/x": X, "net/y": Y})
    assert result[0] == "other-guidance"
    assert words in result[1]


@pytest.mark.parametrize(
    ("channels", "words"), [(range(12), "channels 0–11 of"), ((1, 5, 9), "channels 1, 5, 9 of")]
)
def test_guidance_in_some_channels(channels: Sequence[int], words: str) -> None:
    right, wrong = guided(X, Y), X.clone()
    wrong[..., list(channels)] = right[..., list(channels)]
    cause, text = found(right, wrong, {"net/x": X, "net/y": Y})
    assert cause == "guided-in-part" and words in text and "the others are net/x" in text


def test_a_value_that_is_one_of_two_is_no_guidance() -> None:
    assert found(X, guided(X, Y), {"net/x": X, "net/y": Y})[:1] != ["other-guidance"]


def test_a_clip_that_is_missing() -> None:
    assert found(X.clamp(-1, 1), X, {})[0] == "clip-missing"
    assert found(X.clamp(-1, 1), X + 1e-2, {})[:1] != ["clip-missing"]


@pytest.mark.parametrize("lengths", [(12,), (5, 7)])
def test_rotations_of_values_with_joined_heads_and_of_two_streams(lengths: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(4)
    streams = [torch.randn(2, n, 32, generator=draw) for n in lengths]
    q = torch.cat(streams, 1).unflatten(-1, (2, 16)).transpose(1, 2)  # b h n d
    angles = torch.outer(torch.arange(12.0), 100 ** (-torch.arange(8) / 8))
    pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
    right, wrong = (
        torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), turned)).flatten(-2)
        for turned in (angles, -angles)
    )
    e = evidence(right.numpy(), wrong.numpy())
    before = [Recorded(f"net/to_q{i}", stream.numpy()) for i, stream in enumerate(streams)]
    finding = next(iter(find(type(e)(**{**vars(e), "before": lambda: before}))))
    names = " and ".join(f"net/to_q{i}" for i in range(len(lengths)))
    assert finding.cause == "rotation-sign" and f"rotates {names} by" in finding.evidence


def test_a_table_with_shift_and_scale_exchanged() -> None:
    rows, time = torch.randn(6, 32), TABLE.unflatten(-1, (6, 32))
    normed = F.layer_norm(MEAN, (32,), eps=1e-6)

    def modulated(rows: torch.Tensor, x: torch.Tensor = normed) -> torch.Tensor:
        shift, scale, *_ = (rows + time).chunk(6, 1)
        return x * (1 + scale) + shift

    def causes(wrong: torch.Tensor) -> list[str]:
        values = [Recorded("net/normed", normed.numpy()), Recorded("net/x", MEAN.numpy())]
        values += [Recorded("net/time", TABLE.numpy())]
        alike = [("net.table", rows.double().numpy())]
        e = replace(
            evidence(modulated(rows).numpy(), wrong.numpy()),
            name="m",
            before=lambda: values,
            parameters_like=lambda shape: [entry for entry in alike if entry[1].shape == shape],
        )
        return [finding.evidence for finding in find(e)[:1]]

    assert "shift and scale exchanged" in causes(modulated(rows[[1, 0, 2, 4, 3, 5]]))[0]
    centred = MEAN - MEAN.mean(-1, keepdim=True)
    unbiased = centred / (centred.var(-1, keepdim=True) + 1e-6).sqrt()
    assert "n − 1" in causes(modulated(rows, unbiased))[0]


@pytest.mark.parametrize("merged", [False, True])
def test_a_fused_product_that_is_split_by_heads_first(merged: bool) -> None:
    wrong = torch.cat([Q, K, V], -1).unflatten(-1, (4, 3, 8))[..., 2, :]
    right, wrong = (V, wrong.flatten(2)) if merged else (heads(V), wrong.transpose(1, 2))
    cause, text = found(right, wrong, QKV, name="net/attn.sdpa")
    assert cause == "heads-swapped" and "(4 heads, 3 parts, 8 channels)" in text


def test_heads_of_a_layer_by_itself_are_no_fused_product() -> None:
    wrong = Q.unflatten(-1, (8, 4)).permute(0, 3, 1, 2)
    cause, text = found(heads(Q), wrong, QKV, name="net/attn.sdpa", slot="in.0")
    assert cause == "heads-swapped" and "splits 32 channels as (8 channels, 4 heads)" in text


def test_another_part_of_a_fused_product_is_not_another_split() -> None:
    assert found(heads(V), heads(K), QKV, name="net/attn.sdpa")[:1] != ["heads-swapped"]
