"""Variant replay with parameters, positions and parts: torch's own operations on both sides."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Recorded
from support.findings import evidence

torch.manual_seed(0)
X = torch.randn(2, 12, 16)
SQUARE, WEIGHT, BIAS = torch.randn(16, 16), torch.randn(24, 16), torch.randn(24)
PICTURE = torch.randn(2, 8, 9, 9)
KERNEL, OFFSET = torch.randn(8, 8, 3, 3), torch.randn(8)


def found(
    right: torch.Tensor,
    wrong: torch.Tensor,
    *,
    given: torch.Tensor | None = None,
    before: dict[str, torch.Tensor] | None = None,
    parameters: dict[str, torch.Tensor] | None = None,
    others: dict[str, torch.Tensor] | None = None,
    name: str = "net/m",
) -> tuple[str, str]:
    """The first cause and its evidence; two empty texts where there is none."""
    inputs = {} if given is None else {"in.0": (given.numpy(), given.numpy())}
    values = [Recorded(path, value.numpy()) for path, value in (before or {}).items()]
    alike = [(path, value.double().numpy()) for path, value in (others or {}).items()]
    e = replace(
        evidence(right.numpy(), wrong.numpy(), inputs=inputs),
        name=name,
        before=lambda: values,
        parameters=lambda: {n: p.double().numpy() for n, p in (parameters or {}).items()},
        parameters_like=lambda shape: [entry for entry in alike if entry[1].shape == shape],
    )
    return next(((f.cause, f.evidence) for f in find(e)), ("", ""))


@pytest.mark.parametrize(
    ("weight", "wrong", "cause"),
    [
        (WEIGHT, lambda: F.linear(X, WEIGHT), "bias-missing"),
        (WEIGHT, lambda: F.linear(X, WEIGHT, 2 * BIAS), "bias-twice"),
        (WEIGHT, lambda: F.linear(X, WEIGHT.reshape(16, 24).T, BIAS), "weight-reordered"),
        (WEIGHT, lambda: F.linear(X, 2 * WEIGHT.flip(0), BIAS), "another-parameter"),
        (WEIGHT, lambda: F.linear(X, WEIGHT.bfloat16().float(), BIAS), "rounded"),
        (SQUARE, lambda: F.linear(X, SQUARE.T), "weight-transposed"),
    ],
)
def test_linear_layers(weight: torch.Tensor, wrong: Callable[[], Any], cause: str) -> None:
    bias = BIAS if weight is WEIGHT else None
    right = F.linear(X, weight, bias)
    parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
    others = {"net/other.weight": 2 * WEIGHT.flip(0)}
    assert found(right, wrong(), given=X, parameters=parameters, others=others)[0] == cause


def padded(mode: str = "constant", sides: tuple[int, ...] = (1, 1, 1, 1)) -> torch.Tensor:
    return F.conv2d(F.pad(PICTURE, sides, mode=mode), KERNEL, OFFSET)


@pytest.mark.parametrize(
    ("wrong", "cause", "says"),
    [
        (lambda: padded("reflect"), "other-padding", "reflected"),
        (lambda: padded("replicate"), "other-padding", "border"),
        (lambda: padded("circular"), "other-padding", "other side"),
        (lambda: padded(sides=(0, 2, 0, 2)), "other-padding", "by 0 instead of 1"),
        (lambda: F.conv2d(PICTURE, KERNEL, padding=1), "bias-missing", "bias"),
        (lambda: F.conv2d(PICTURE, KERNEL.flip(2, 3), OFFSET, padding=1), "kernel-flipped", ""),
        (lambda: F.conv2d(PICTURE, KERNEL.mT, OFFSET, padding=1), "weight-transposed", "kernel"),
        (lambda: F.conv2d(PICTURE, KERNEL.transpose(0, 1), OFFSET, padding=1),
         "weight-transposed", "inputs and outputs"),
        (lambda: F.conv2d(PICTURE, KERNEL.reshape(8, 3, 3, 8).permute(0, 3, 1, 2), OFFSET,
                          padding=1), "weight-reordered", "channels first"),
    ],
)  # fmt: skip
def test_convolutions(wrong: Callable[[], torch.Tensor], cause: str, says: str) -> None:
    right = F.conv2d(PICTURE, KERNEL, OFFSET, padding=1)
    parameters = {"weight": KERNEL, "bias": OFFSET}
    result = found(right, wrong(), given=PICTURE, parameters=parameters)
    assert result[0] == cause and says in result[1]


def test_stride_and_padding_of_a_reduced_picture() -> None:
    right = F.conv2d(F.pad(PICTURE, (0, 1, 0, 1)), KERNEL, OFFSET, stride=2)
    wrong = F.conv2d(F.pad(PICTURE, (1, 0, 1, 0)), KERNEL, OFFSET, stride=2)
    parameters = {"weight": KERNEL, "bias": OFFSET}
    assert found(right, wrong, given=PICTURE, parameters=parameters)[0] == "other-padding"


def test_groups_of_a_norm_are_known_with_its_weight() -> None:
    weight, bias = torch.rand(8) + 0.5, torch.randn(8)
    one = PICTURE[:1]
    right, wrong = (F.group_norm(one, groups, weight, bias, 1e-6) for groups in (2, 4))
    cause, text = found(right, wrong, given=one, parameters={"weight": weight, "bias": bias})
    assert cause == "other-norm" and "port is a group norm of 4 groups" in text


def test_the_weight_of_another_norm_and_a_missing_parameter() -> None:
    own, other = torch.rand(16) + 0.5, torch.rand(16) + 0.5
    right, wrong = (F.rms_norm(X, (16,), weight, 1e-6) for weight in (own, other))
    named = {"net/layers.2.norm.weight": other}
    cause, text = found(right, wrong, given=X, parameters={"weight": own}, others=named)
    assert cause == "another-parameter" and "net/layers.2.norm.weight" in text
    table = torch.randn(1, 12, 16)
    cause, text = found(X + table, X, others={"net/table": table})
    assert cause == "branch-missing" and "parameter net/table" in text


HEADS = torch.randn(2, 4, 16, 32)  # batch, heads, tokens, width
ANGLES = torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(0, 32, 2) / 32))
HALVES = torch.cat((ANGLES, ANGLES), -1)


def halves(x: torch.Tensor, angles: torch.Tensor = HALVES) -> torch.Tensor:
    return apply_rotary_pos_emb(x, x, angles.cos()[None], angles.sin()[None])[0]


def neighbours(x: torch.Tensor, angles: torch.Tensor = ANGLES) -> torch.Tensor:
    table: Any = (angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1))
    rotate: Any = apply_rotary_emb
    return rotate(x, table)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Neighbours are turned, with a table for two halves."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * HALVES.cos() + turned * HALVES.sin()


def mixed_table(x: torch.Tensor) -> torch.Tensor:
    """The two halves are turned, with a table for neighbours."""
    turned = torch.cat((-x[..., 16:], x[..., :16]), -1)
    angles = ANGLES.repeat_interleave(2, -1)
    return x * angles.cos() + turned * angles.sin()


def in_16_bits(x: torch.Tensor) -> torch.Tensor:
    turned = torch.cat((-x[..., 16:], x[..., :16]), -1)
    cosines, sines = (t.bfloat16().float() for t in (HALVES.cos(), HALVES.sin()))
    return x * cosines + turned * sines


GRID = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))


def two_axes(order: tuple[int, int]) -> torch.Tensor:
    rates = 100 ** (-torch.arange(0, 16, 2) / 16)
    angles = torch.cat([torch.outer(GRID[:, axis], rates) for axis in order], -1)
    return neighbours(HEADS, angles)


BASE = torch.outer(torch.arange(16.0), 500000 ** (-torch.arange(0, 32, 2) / 32))


@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        (halves(HEADS), neighbours(HEADS), "rotation-pairs"),
        (neighbours(HEADS), halves(HEADS), "rotation-pairs"),
        (halves(HEADS), mixed(HEADS), "rotation-pairs"),
        (halves(HEADS), mixed_table(HEADS), "rotation-pairs"),
        (halves(HEADS), in_16_bits(HEADS), "rotation-rounded"),
        (halves(HEADS), halves(HEADS, -HALVES), "rotation-sign"),
        (halves(HEADS), HEADS, "rotation-missing"),
        (halves(HEADS), halves(HEADS, HALVES + HALVES[1]), "rotation-offset"),
        (neighbours(HEADS), neighbours(HEADS, BASE), "rotation-base"),
        (two_axes((0, 1)), two_axes((1, 0)), "rotation-axes"),
    ],
)
def test_rotations(right: torch.Tensor, wrong: torch.Tensor, cause: str) -> None:
    assert found(right, wrong, before={"net/norm_q": HEADS})[0] == cause


def test_a_norm_of_what_is_rotated() -> None:
    weight = torch.rand(32) + 0.5
    right = halves(F.rms_norm(HEADS, (32,), weight, 1e-6))
    wrong = F.rms_norm(halves(HEADS), (32,), weight, 1e-6)
    normed = F.rms_norm(HEADS, (32,), weight, 1e-6)
    values = [Recorded("net/norm_q", normed.numpy())]
    e = replace(evidence(right.numpy(), wrong.numpy()), before=lambda: values)
    own = {"weight": weight.double().numpy()}
    e = replace(e, parameters_of=lambda name: own if name == "net/norm_q" else {})
    assert find(e)[0].cause == "norm-after-rotation"


def test_table_of_rotations() -> None:
    wide = torch.cat((BASE, BASE), -1)
    cause, text = found(HALVES.cos(), wide.cos())
    assert cause == "other-rotation-table" and "port is a table of cosines with base 500000" in text


Q, K, V = torch.randn(2, 16, 64), torch.randn(2, 16, 32), torch.randn(2, 16, 32)
QKV = {"net/attn.query": Q, "net/attn.k_proj": K, "net/attn.value": V}
TABLES = {"net [in.cos]": HALVES.cos(), "net [in.sin]": HALVES.sin()}


def split(x: torch.Tensor, width: int = 32) -> torch.Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def attend(
    turn: Callable[[torch.Tensor], torch.Tensor] = halves,
    turn_keys: Callable[[torch.Tensor], torch.Tensor] | None = None,
    repeat: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.repeat_interleave(2, 1),
    **how: Any,
) -> torch.Tensor:
    q, k, v = turn(split(Q)), repeat((turn_keys or turn)(split(K))), repeat(split(V))
    return F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2).flatten(2)


def test_rotation_inside_attention() -> None:
    right = attend(is_causal=True)
    for wrong, says in (
        (attend(neighbours, is_causal=True), "pairs of neighbouring numbers"),
        (attend(lambda x: x, is_causal=True), "without the rotation"),
        (attend(lambda x: halves(x, -HALVES), is_causal=True), "negative"),
        (attend(turn_keys=lambda x: halves(x, HALVES + HALVES[1]), is_causal=True), "k rotated as"),
    ):
        cause, text = found(right, wrong, before={**QKV, **TABLES}, name="net/attn.o_proj")
        assert cause == "rotation-in-attention" and says in text


@pytest.mark.parametrize("part", ["q", "k", "q and k"])
def test_a_rotation_in_an_attention_without_one(part: str) -> None:
    turns = [halves if each in part else lambda x: x for each in "qk"]
    right, wrong = attend(lambda x: x), attend(*turns)
    cause, text = found(right, wrong, before={**QKV, **TABLES}, name="net/attn.o_proj")
    assert cause == "rotation-in-attention"
    assert f"with {part} rotated, unlike the reference" in text and "two halves" in text


def test_heads_of_keys_repeated_in_the_wrong_order() -> None:
    q, k = torch.randn(2, 16, 64), torch.randn(2, 16, 32)
    before = {"net/attn.to_q": q, "net/attn.to_k": k, "net/attn.to_v": V}

    def grouped(repeat: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        keys, values = (repeat(split(x, 16)) for x in (k, V))
        y = F.scaled_dot_product_attention(split(q, 16), keys, values)
        return y.transpose(1, 2).flatten(2)

    right, wrong = (
        grouped(lambda x: x.repeat_interleave(2, 1)), grouped(lambda x: x.repeat(1, 2, 1, 1))
    )  # fmt: skip
    assert found(right, wrong, before=before, name="net/attn.to_out")[0] == "heads-repeated-wrongly"


def test_buckets_of_t5() -> None:
    distance = torch.arange(20)[None] - torch.arange(20)[:, None]
    right, wrong = (
        T5Attention._relative_position_bucket(distance, both, 32, 128) for both in (True, False)
    )
    assert found(right, wrong)[0] == "other-buckets"


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("other", ["bilinear", "corners", "tiled"])
def test_resized_pictures(mode: str, other: str) -> None:
    right = F.interpolate(PICTURE, scale_factor=2, mode=mode)
    if other == "tiled":
        wrong = PICTURE.repeat(1, 1, 2, 2)
    elif other == "corners":
        wrong = F.interpolate(PICTURE, scale_factor=2, mode="bilinear", align_corners=True)
    else:
        wrong = F.interpolate(PICTURE, scale_factor=2, mode="bilinear")
    result = found(right, wrong, before={"net/x": PICTURE})
    assert result[0] == ("" if mode == other else "other-resize")


TOKENS = torch.randn(2, 24, 8)
TABLE = torch.randn(100, 8)
CUT = TABLE.reshape(10, 10, 8)


def test_tables_of_positions() -> None:
    picture = TOKENS.transpose(1, 2).reshape(2, 8, 6, 4)
    right = TOKENS + CUT[2:8, 3:7].reshape(24, 8)
    parameters = {"table": TABLE[None]}
    for wrong, cause in (
        (TOKENS, "positions-missing"),
        (TOKENS + CUT[:6, :4].reshape(24, 8), "positions-shifted"),
        (TOKENS + CUT[3:7, 2:8].transpose(0, 1).reshape(24, 8), "positions-transposed"),
        (picture.transpose(2, 3).flatten(2).mT + CUT[2:8, 3:7].reshape(24, 8), "token-order"),
    ):
        before = {"net/proj": picture}
        assert found(right, wrong, before=before, parameters=parameters)[0] == cause


def test_tokens_chunks_and_parts() -> None:
    rows = TOKENS[torch.arange(2), torch.tensor([5, 9])]
    assert found(rows, TOKENS[:, 0], before={"net/x": TOKENS})[0] == "another-token"
    moments = torch.randn(1, 8, 6, 6)
    mean, variance = moments.chunk(2, 1)
    assert found(mean, variance, before={"net/x": moments})[0] == "another-chunk"
    a, b = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    parts = {"net/a": a, "net/b": b}
    both, turned = torch.cat((a, b), 1), torch.cat((b, a), 1)
    assert found(both, turned, before=parts)[0] == "parts-reordered"


def test_patches() -> None:
    picture = torch.randn(2, 6, 8, 4)
    patches = picture.unflatten(2, (4, 2)).unflatten(4, (2, 2))  # b c H p W q
    right = patches.permute(0, 2, 4, 3, 5, 1).reshape(2, 8, 24)
    wrong = patches.permute(0, 2, 4, 1, 3, 5).reshape(2, 8, 24)
    cause, text = found(right, wrong, before={"net/x": picture})
    assert cause == "patch-order" and "reference as (patch row, patch column) of (row" in text


def test_patches_of_a_video() -> None:
    tokens = torch.randn(1, 3 * 4 * 5, 24)
    right, wrong = (
        tokens.reshape(1, 3, 4, 5, *inner).permute(
            0, 3 + at["c"], 1, 2, 3 + at["p"], 3, 3 + at["q"]
        )
        for inner, at in (((2, 2, 6), dict(p=1, q=2, c=3)), ((6, 2, 2), dict(c=1, p=2, q=3)))
    )
    right, wrong = (x.reshape(1, 6, 3, 8, 10) for x in (right, wrong))
    cause, text = found(right, wrong, before={"net/proj_out": tokens})
    assert cause == "patch-order" and "(row, column, channel); " in text


def test_dropout_is_seen_by_its_zeros() -> None:
    torch.manual_seed(1)
    assert found(X, F.dropout(X, 0.2))[0] == "dropout"
    y = torch.randn_like(X)
    assert found(y + X, y + F.dropout(X, 0.2), before={"net/y": y})[0] == "dropout"


def test_unrelated_values_are_not_explained() -> None:
    parameters = {"weight": SQUARE, "bias": torch.randn(16)}
    right = F.linear(X, SQUARE, parameters["bias"])
    for seed in range(5):
        torch.manual_seed(seed + 10)
        noise = right + 0.3 * torch.randn_like(right)
        assert found(right, noise, given=X, parameters=parameters) == ("", "")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x, w: F.batch_norm(x, None, None, w[2], w[3], True), "of the batch itself"),
        (lambda x, w: F.batch_norm(x, 0 * w[0], 1 + 0 * w[1], w[2], w[3]), "were not loaded"),
        (
            lambda x, w: F.batch_norm(x, w[0], w[1] ** 2, w[2], w[3]),
            "the variance, not by its root",
        ),
    ],
)
def test_batch_norms(wrong: Callable[..., torch.Tensor], says: str) -> None:
    values = torch.randn(8), torch.rand(8) + 1, torch.rand(8) + 0.5, torch.randn(8)
    names: tuple[str, ...] = ("running_mean", "running_var", "weight", "bias")
    known: dict[str, torch.Tensor] = dict(zip(names, values, strict=True))
    right = F.batch_norm(PICTURE, *values)
    cause, text = found(right, wrong(PICTURE, values), given=PICTURE, parameters=known)
    assert cause == "other-batch-norm" and says in text.partition(", the reference")[0]


def test_a_bias_of_which_a_part_is_lost() -> None:
    kept = torch.where(torch.arange(24) < 10, BIAS, torch.zeros(24))
    known = {"weight": WEIGHT, "bias": BIAS}
    cause, text = found(
        F.linear(X, WEIGHT, BIAS), F.linear(X, WEIGHT, kept), given=X, parameters=known
    )
    assert cause == "other-bias" and "zero in 14 of 24 entries, the first of them 10" in text


def test_rows_that_are_all_one_do_not_show_a_bias() -> None:
    """Another activation before the layer adds the same to each of them, as another bias does."""
    known = {"weight": WEIGHT, "bias": BIAS}
    x = torch.randn(1, 16).repeat(2, 1)
    taken = F.silu(x) + 1e-8 * torch.randn(2, 16)
    right, wrong = F.linear(taken, WEIGHT, BIAS), F.linear(x, WEIGHT, BIAS)
    before = {"net/m [in.0]": taken, "net/x": x}
    cause, text = found(right, wrong, before=before, parameters=known)
    assert cause == "other-activation" and "applies no activation to net/x" in text
    assert found(right, wrong, before={"net/m [in.0]": taken}, parameters=known)[0] != "other-bias"


def test_a_weight_in_16_bits_after_an_input_with_rounding_of_its_own() -> None:
    right, noise = F.linear(X, WEIGHT, BIAS), 1e-5 * torch.randn(X.shape)
    known = {"weight": WEIGHT, "bias": BIAS}
    wrong = F.linear(X + noise, WEIGHT.half().float(), BIAS)
    before = {"net/m [in.0]": X}
    assert found(right, wrong, before=before, parameters=known)[0] == "rounded"
    wrong = F.linear(X + noise, WEIGHT + 1e-3 * torch.randn(WEIGHT.shape), BIAS)
    assert found(right, wrong, before=before, parameters=known)[0] != "rounded"


def test_a_norm_after_the_rotation() -> None:
    x, weight = torch.randn(2, 12, 4, 16), torch.rand(16) + 0.5
    angles = torch.outer(torch.arange(12.0), 10000 ** (-torch.arange(8) / 8))[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    parts = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    turned = torch.stack(parts, -1).flatten(3)
    right, wrong = (F.rms_norm(v, (16,), weight, 1e-6) for v in (x, turned))
    cause, text = found(right, wrong, given=x, parameters={"weight": weight})
    assert cause == "norm-after-rotation" and "neighbouring numbers" in text


def test_a_bias_that_is_missing_in_one_part_of_q_k_and_v() -> None:
    names = [f"net.0.to_{part}" for part in "qkv"]
    weights = {f"{name}.weight": torch.randn(16, 16) for name in names}
    biases = {f"{name}.bias": torch.randn(16) for name in names}
    weight, bias = (torch.cat(list(each.values())) for each in (weights, biases))
    some = torch.cat([bias[:32], torch.zeros(16)])
    cause, text = found(
        F.linear(X, weight, bias), F.linear(X, weight, some), given=X, name="net.0.to_q",
        parameters={"weight": weight[:16], "bias": bias[:16]}, others=weights | biases,
    )  # fmt: skip
    assert cause == "bias-missing" and "without the bias of its part v" in text


def test_q_k_and_v_of_another_block() -> None:
    names = [f"net.{n}.to_{part}.weight" for n in (0, 1) for part in "qkv"]
    weights = {name: torch.randn(16, 16) for name in names}
    first, second = (torch.cat([weights[n] for n in names[at : at + 3]]) for at in (0, 3))
    cause, text = found(
        F.linear(X, first), F.linear(X, second), given=X, name="net.0.to_q",
        parameters={"weight": weights[names[0]]}, others=weights,
    )  # fmt: skip
    assert cause == "another-parameter" and "net.1.to_q/k/v" in text
