"""Forms of layers, embeddings, masks and positions that a port may have by mistake."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lydite.diff.findings import find, in_another_order
from lydite.diff.findings.evidence import Evidence, Recorded
from lydite.diff.findings.replay.quantized_weight import quantized
from support.findings import evidence

torch.manual_seed(1)
X, Y = torch.randn(2, 12, 32), torch.randn(2, 12, 32)
Z = torch.randn(2, 12, 96)
WEIGHT, BIAS = torch.randn(24, 32), torch.randn(24)
TABLE = torch.randn(10, 4)
IDS = torch.randint(0, 10, (12, 12))
TIME = torch.randn(2, 32)


def seen(
    right: Tensor,
    wrong: Tensor,
    before: dict[str, Tensor] | None = None,
    parameters: dict[str, Tensor] | None = None,
    given: Tensor | None = None,
    **more: Any,
) -> Evidence:
    values = [Recorded(name, value.numpy()) for name, value in (before or {}).items()]
    inputs = {} if given is None else {"in.0": (given.numpy(), given.numpy())}
    named = {n: p.double().numpy() for n, p in (parameters or {}).items()}
    e = evidence(right.numpy(), wrong.numpy(), inputs=inputs, **more)
    return replace(e, name="net.m", before=lambda: values, parameters=lambda: named)


def first(e: Evidence) -> tuple[str, str]:
    return next(((f.cause, f.evidence + f.fix) for f in find(e)), ("", ""))


def linear(x: Tensor, weight: Tensor = WEIGHT) -> Tensor:
    return F.linear(x, weight, BIAS)


def unmoved(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, 8)).transpose(1, 2).reshape(2, 12, 32)


def in_bits(words: str) -> Tensor:
    return torch.from_numpy(dict(quantized(WEIGHT.double().numpy()))[words]).float()


@pytest.mark.parametrize(
    ("wrong", "cause", "says"),
    [
        (lambda: linear(unmoved(X)), "heads-not-moved", "without moving their axis"),
        (
            lambda: linear(X, WEIGHT.unflatten(1, (4, 8)).transpose(1, 2).flatten(1)),
            "weight-reordered",
            "8 × 4",
        ),
        (
            lambda: linear(X, in_bits("quantized to 4 bits in groups of 32 inputs (symmetric)")),
            "quantized",
            "4 bits",
        ),
    ],
)
def test_forms_of_a_linear_layer(wrong: Callable[[], Tensor], cause: str, says: str) -> None:
    e = seen(linear(X), wrong(), parameters={"weight": WEIGHT, "bias": BIAS}, given=X)
    assert (first(e)[0], says in first(e)[1]) == (cause, True)


def test_a_layer_whose_weight_is_in_another_order_is_computed_in_that_order() -> None:
    right, wrong = linear(F.silu(X)), linear(X).roll(12, -1)
    e = seen(
        right, wrong, {"net.m [in.0]": F.silu(X), "net/x": X}, {"weight": WEIGHT, "bias": BIAS}
    )
    (found,) = in_another_order(e)
    assert "silu" in found.evidence or "net/x" in found.evidence


def gelu(x: Tensor, cubic: float = 0.044715) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + cubic * x**3)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(gelu(X, 0.0044715) * Y, "0.0044715"), (gelu(X * Y), "of the product")],
)
def test_gates_with_another_constant_or_of_the_product(wrong: Tensor, says: str) -> None:
    assert says in first(seen(gelu(X) * Y, wrong, {"net/y": Y, "net/x": X}))[1]
    assert "0.0044715" in first(seen(gelu(X), gelu(X, 0.0044715), {"net/x": X}))[1]


def test_the_eps_of_a_norm_that_is_modulated() -> None:
    small = 0.01 * X

    def modulated(eps: float) -> Tensor:
        return F.layer_norm(small, (32,), eps=eps) * (1 + TIME[:, None]) + TIME.flip(0)[:, None]

    cause, text = first(seen(modulated(1e-6), modulated(1e-5), {"net/x": small}))
    assert cause == "other-norm" and "eps 1e-05" in text


def test_a_gate_on_the_whole_sum_and_a_part_that_is_missing() -> None:
    gate = TIME[:, None]
    e = seen(X + gate * Y, gate * (X + Y), {"net/y": Y, "net/x": X, "net/gate": TIME})
    assert "gated as a whole" in first(e)[1]
    parts = {f"net.m.{n}": torch.randn(2, 32) for n in "abc"}
    whole = parts["net.m.a"] + parts["net.m.b"] + parts["net.m.c"]
    e = seen(whole, whole - parts["net.m.b"], parts)
    assert first(e)[0] == "branch-missing" and "net.m.b" in first(e)[1]


def test_an_embedding_whose_table_is_reshaped() -> None:
    wrong = TABLE.reshape(4, 10).T[IDS]
    e = seen(TABLE[IDS], wrong, parameters={"weight": TABLE}, given=IDS)
    assert first(e)[0] == "other-embedding" and "reshaped" in first(e)[1]


def test_positions_that_the_port_adds() -> None:
    angles = torch.arange(12)[:, None] * 100.0 ** (-torch.arange(16) / 16)
    table = torch.cat([angles.sin(), angles.cos()], -1)
    assert "sinusoids" in first(seen(X, X + table))[1]
    assert first(seen(X[:1], X[:1] + table))[0] != "positions-added"  # one row shows nothing
    same = torch.cat([X[:1].expand_as(X)[:, :6], X[:, 6:]], 1)  # where the rows are equal
    assert first(seen(same, same + (torch.arange(12) < 6)[:, None] * table))[0] != "positions-added"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]], "end token"),
        ([[1] * 6] * 2, "all tokens"),
        ([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], "backwards"),
    ],
)
def test_masks_of_zeros_and_ones(wrong: list[list[int]], says: str) -> None:
    right = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    cause, text = first(seen(right, torch.tensor(wrong), kind="input"))
    assert (cause, says in text) == ("other-mask", True)


def test_positions_of_tokens() -> None:
    right = torch.zeros(12, 3)
    right[6:, 1], right[6:, 2] = torch.arange(6) // 3, torch.arange(6) % 3
    counted, exchanged = right.clone(), right[:, [0, 2, 1]]
    counted[:6, 0] = torch.arange(6)
    moved, stretched = right + torch.tensor([0, 2, 0]), right * torch.tensor([1, 1, 2])
    assert "counts from 1 in the port" in first(seen(right, counted))[1]
    assert "axis 1 has the positions of the reference's axis 2" in first(seen(right, exchanged))[1]
    assert "displaced by +2 (offset)" in first(seen(right, moved))[1]
    assert "times 2" in first(seen(right, stretched))[1]


def test_an_activation_of_one_of_two_joined_values() -> None:
    def joined(act: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([X[..., :16], act(Y[..., :16])], -1)

    named = {"net.m [in.0]": joined(F.silu), "net/x": X[..., :16], "net/a": F.silu(Y[..., :16])}
    named["net/y"] = Y[..., :16]
    e = seen(
        linear(joined(F.silu)), linear(joined(F.gelu)), named, {"weight": WEIGHT, "bias": BIAS}
    )
    assert first(e)[0] == "other-activation" and "joins gelu of net/y" in first(e)[1]


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (8,), eps=1e-6)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda q: q.reshape(2, 12, 8, 4).transpose(2, 3), "inner axis"),
        (lambda _: Z[..., 32:64].unflatten(-1, (4, 8)), "part 1 of 3"),
    ],
)
def test_heads_and_parts_before_a_norm(wrong: Callable[[Tensor], Tensor], says: str) -> None:
    q = X.unflatten(-1, (4, 8))
    named = {"net.m [in.0]": q, "net/to_q": X, "net/fused": Z}
    e = seen(normed(q), normed(wrong(X)), named, {"weight": torch.ones(8)})
    assert says in first(e)[1]


def test_streams_joined_in_another_order_than_their_positions() -> None:
    image, text = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 5, 8)
    angles = torch.arange(12)[:, None] * 100.0 ** (-torch.arange(4) / 4)

    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.stack(turned, -1).flatten(-2)

    right, wrong = (rotated(torch.cat(both, 2)) for both in ((text, image), (image, text)))
    cause, found = first(seen(right, wrong, {"net/image": image, "net/text": text}))
    assert cause == "parts-reordered" and "net/image and net/text in this order" in found


def test_a_query_for_a_key_is_no_input_that_is_passed_on() -> None:
    e = seen(X, Y, slot="in.0")
    e = replace(e, others=lambda: [("net.m [in.1]", Y.numpy())])
    (found, *_) = find(e)
    assert found.cause == "another-value" and "not applied" not in found.fix


def test_a_time_that_is_not_added_before_a_norm() -> None:
    weight, bias = torch.rand(32) + 0.5, torch.randn(32)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (32,), weight, bias)

    named = {"net.m [in.0]": X + TIME[:, None], "net/x": X, "net/time": TIME}
    e = seen(norm(X + TIME[:, None]), norm(X), named, {"weight": weight, "bias": bias})
    assert "net/time is not added" in first(e)[1]


def test_quantized_weights_lie_on_a_grid() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 64))
    for words, value in quantized(weight):
        bits = int(words.split(" bits")[0].rpartition(" ")[2])
        assert len(np.unique(np.round(value[0, :32], 9))) <= 2**bits, words
        assert np.abs(value - weight).max() < 3 / (2 ** (bits - 1) - 1 or 1) + 1e-3
