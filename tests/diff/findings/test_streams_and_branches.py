"""Gates, branches, joined streams, layouts and pictures: what a port does between two modules."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Recorded
from support.findings import evidence

torch.manual_seed(7)
X, Y, Z = (torch.randn(2, 12, 16) + 0.2 for _ in range(3))
TABLE = 0.7 * torch.randn(2, 4 * 16)
CHUNKS = TABLE.chunk(4, -1)
NORM = F.layer_norm(X, (16,))
PICTURE = torch.randn(2, 8, 8, 8)
KERNEL, OFFSET = torch.randn(8, 8, 3, 3), torch.randn(8)
WEIGHT, BIAS = torch.randn(24, 16), torch.randn(24)
POSITIONS = torch.randn(1, 12, 16)


def found(
    right: torch.Tensor,
    wrong: torch.Tensor,
    before: dict[str, torch.Tensor],
    parameters: dict[str, torch.Tensor] | None = None,
    *,
    name: str = "net/b.m",
    slot: str = "out",
) -> tuple[str, str]:
    """The first cause and its evidence; two empty texts where there is none."""
    values = [Recorded(path, v.numpy(), lambda v=v: v.numpy()) for path, v in before.items()]
    e = replace(
        evidence(right.contiguous().numpy(), wrong.contiguous().numpy(), slot=slot),
        name=name,
        before=lambda: values,
        parameters=lambda: {n: p.double().numpy() for n, p in (parameters or {}).items()},
    )
    return next(((f.cause, f.evidence) for f in find(e)), ("", ""))


def gated(gate: torch.Tensor, y: torch.Tensor = Y) -> torch.Tensor:
    return X + gate[:, None] * y


@pytest.mark.parametrize(
    ("wrong", "cause", "says"),
    [
        (gated(CHUNKS[1]), "other-gate", "chunk 1 of net/ada ·"),
        (gated(CHUNKS[1].sigmoid()), "other-gate", "sigmoid(chunk 1"),
        (gated(CHUNKS[2].tanh()), "other-gate", "tanh(chunk 2"),
        (gated(torch.ones(2, 16)), "gate-missing", "the reference net/x + tanh(chunk 1"),
        (gated(CHUNKS[1].tanh(), Z), "other-sum", "net/z"),
        (gated(CHUNKS[1].tanh(), F.silu(Y)), "activation-extra", "· silu(net/y) to net/x"),
        (gated(CHUNKS[1].tanh()) - X, "residual-missing", "the reference net/x +"),
        (gated(CHUNKS[1].tanh()) - X + Z, "other-sum", "its residual is net/z, not net/x"),
    ],
)
def test_gates_through_tanh(wrong: torch.Tensor, cause: str, says: str) -> None:
    before = {"net/y": Y, "net/z": Z, "net/x": X, "net/ada": TABLE}
    result = found(gated(CHUNKS[1].tanh()), wrong, before)
    assert result[0] == cause and says in result[1]


def test_a_gate_that_is_wrong_in_the_port_itself() -> None:
    gates = {"net/norm [out.1]": CHUNKS[1], "net/norm [out.3]": CHUNKS[3]}
    values = [Recorded("net/y", Y.numpy()), Recorded("net/x", X.numpy())]
    own = CHUNKS[1].numpy()  # what the port has as both
    values += [Recorded(name, gate.numpy(), lambda: own) for name, gate in gates.items()]
    e = evidence(gated(CHUNKS[3]).numpy(), gated(CHUNKS[1]).numpy())
    finding = find(replace(e, name="net/b.m", before=lambda: values))[0]
    assert finding.cause == "other-gate" and "net/norm [out.1]" in finding.evidence


def modulated(scale: int | None, shift: int | None = None, one: float = 1.0) -> torch.Tensor:
    value = NORM if scale is None else NORM * (one + CHUNKS[scale][:, None])
    return value if shift is None else value + CHUNKS[shift][:, None]


@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        (modulated(1), modulated(1, one=0.0), "one-plus-missing"),
        (modulated(1), modulated(2), "other-chunks"),
        (modulated(1), NORM, "modulation-missing"),
        (modulated(1, 0), modulated(1), "shift-missing"),
        (modulated(1, 0), modulated(None, 0), "scale-missing"),
    ],
)
@pytest.mark.parametrize("layer", [False, True])
def test_scale_without_shift(
    right: torch.Tensor, wrong: torch.Tensor, cause: str, layer: bool
) -> None:
    before = {"net/b.norm": NORM, "net/ada": TABLE}
    if layer and cause == "scale-missing":
        return
    if layer:
        before = {"net/b.m [in.0]": right, **before}
        right, wrong = (F.linear(x, WEIGHT, BIAS) for x in (right, wrong))
        assert found(right, wrong, before, {"weight": WEIGHT, "bias": BIAS})[0] == cause
    else:
        assert found(right, wrong, before)[0] == cause


def test_what_is_modulated() -> None:
    long = torch.cat((Z, X), 1)
    scale, shift = 1 + CHUNKS[0][:, None], CHUNKS[1][:, None]
    before = {"net/x": X, "net/long": long, "net/ada": TABLE}
    cause, text = found(X * scale + shift, Z * scale + shift, before)
    assert cause == "another-input" and "tokens 0 to 11 of net/long" in text
    cause, text = found(X * scale + shift, NORM * scale + shift, before)
    assert cause == "norm-extra" and "a layer norm of net/x" in text


def test_a_modulated_layer_input_without_its_norm() -> None:
    scale, shift = 1 + CHUNKS[0][:, None], CHUNKS[1][:, None]
    right, wrong = (x * scale + shift for x in (NORM, X))
    before = {"net/b.m [in.0]": right, "net/norm": NORM, "net/x": X, "net/ada": TABLE}
    right, wrong = (F.linear(x, WEIGHT, BIAS) for x in (right, wrong))
    cause, text = found(right, wrong, before, {"weight": WEIGHT, "bias": BIAS})
    assert cause == "another-input" and "port modulates net/x, the reference net/norm" in text
    assert "a layer norm lies between the two" in text


def test_a_norm_is_computed_from_what_comes_before_all_norms() -> None:
    """The norm of a normed value is the same: the port takes the value itself."""
    scale, shift = 1 + CHUNKS[0][:, None], CHUNKS[1][:, None]
    other = F.layer_norm(Z, (16,))
    before = {"net/norm": NORM, "net/x": X, "net/first": other, "net/z": Z, "net/ada": TABLE}
    cause, text = found(NORM * scale + shift, other * scale + shift, before)
    assert cause == "another-input" and "the norm of net/z, the reference that of net/x" in text


@pytest.mark.parametrize(
    ("total", "cause"),
    [
        (gated(CHUNKS[3]), "other-gate"),
        (gated(torch.ones(2, 16)), "gate-missing"),
        (CHUNKS[1][:, None] * Y, "residual-missing"),
    ],
)
def test_a_sum_before_a_modulated_norm(total: torch.Tensor, cause: str) -> None:
    right, wrong = (
        F.layer_norm(x, (16,)) * (1 + CHUNKS[0][:, None]) + CHUNKS[2][:, None]
        for x in (gated(CHUNKS[1]), total)
    )
    before = {"net/b.norm [in.0]": gated(CHUNKS[1]), "net/y": Y, "net/x": X, "net/ada": TABLE}
    assert found(right, wrong, before, slot="in.0")[0] == cause


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (16,))


def linear(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, WEIGHT, BIAS)


@pytest.mark.parametrize("layer", [norm, linear])
def test_a_branch_with_a_factor(layer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = {"net/b.m [in.0]": X + Y, "net/y": Y, "net/x": X}
    parameters = {"weight": WEIGHT, "bias": BIAS} if layer is linear else {}
    cause, text = found(layer(X + Y), layer(X + 0.1 * Y), before, parameters)
    assert cause == "other-factors" and "net/x + 0.1 · net/y" in text


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (0 * POSITIONS, "without it"),
        (POSITIONS.roll(-1, 1), "displaced by +1 position"),
        (POSITIONS.unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2), "read column by column"),
    ],
)
def test_positions_before_a_norm(table: torch.Tensor, says: str) -> None:
    before = {"net/b.m [in.0]": X + POSITIONS, "net/positions": POSITIONS, "net/tokens": X}
    cause, text = found(norm(X + POSITIONS), norm(X + table), before)
    assert "positions" in cause and says in text


def test_an_input_of_a_norm_that_is_scaled() -> None:
    small = 0.05 * X
    cause, text = found(norm(small), norm(4 * small), {"net/b.m [in.0]": small})
    assert cause == "input-scaled" and "√16" in text
    assert found(norm(small), F.layer_norm(small, (16,), eps=1e-3),
                                 {"net/b.m [in.0]": small})[0] == "other-norm"  # fmt: skip


def test_a_branch_in_another_order() -> None:
    branch = torch.randn(2, 8, 8, 8)
    before = {"net/b.m [in.0]": PICTURE}
    cause, text = found(PICTURE + branch, PICTURE + branch.mT, before)
    assert cause == "transposed" and "what is added to net/b.m [in.0]" in text
    assert found(PICTURE + branch, PICTURE + 0.5 * branch, before)[0] == "scaled"


def joined(*orders: tuple[tuple[torch.Tensor, int], ...]) -> torch.Tensor:
    """Tokens of streams one behind the other, of another length in each row, and zeros."""
    rows = [torch.cat([x[row, :n] for x, n in order]) for row, order in enumerate(orders)]
    return torch.stack([F.pad(row, (0, 0, 0, 20 - len(row))) for row in rows])


def test_streams_of_other_lengths_in_each_row() -> None:
    right = joined(((X, 6), (Y, 12)), ((X, 4), (Y, 12)))
    before = {"net/y": Y, "net/z": Z, "net/x": X}
    turned = joined(((Y, 12), (X, 6)), ((Y, 12), (X, 4)))
    cause, text = found(right, turned, before)
    assert cause == "parts-reordered" and "the port has tokens 0 to 11 of net/y" in text
    other = joined(((X, 6), (Z, 12)), ((X, 4), (Z, 12)))
    cause, text = found(right, other, before)
    assert cause == "another-value" and "tokens 0 to 11 of net/z" in text


def convolved(x: torch.Tensor, **more: int) -> torch.Tensor:
    return F.conv2d(x, KERNEL, OFFSET, **more)


def enlarged(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2)


SMALL, OTHER = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4)
SPREAD = torch.zeros(2, 8, 8, 8)
SPREAD[:, :, ::2, ::2] = SMALL


@pytest.mark.parametrize(
    ("wrong", "cause", "says"),
    [
        (convolved(SPREAD, padding=1), "other-resize", "putting zeros between the pixels"),
        (enlarged(convolved(SMALL, padding=1)), "other-order", "before it is enlarged"),
        (convolved(enlarged(OTHER), padding=1), "another-input", "resizes net/other"),
        (convolved(SMALL.repeat(1, 1, 2, 2), padding=1).movedim(1, -1), "other-resize", "tiling"),
    ],
)
def test_convolutions_of_enlarged_pictures(wrong: torch.Tensor, cause: str, says: str) -> None:
    right = enlarged(SMALL)
    before = {"net/b.m [in.0]": right, "net/small": SMALL, "net/other": OTHER}
    parameters = {"weight": KERNEL, "bias": OFFSET}
    result = found(convolved(right, padding=1), wrong, before, parameters)
    assert result[0] == cause and says in result[1]


def test_a_skip_connection_of_another_block() -> None:
    a, b, c = (torch.randn(2, 8, 6, 6) for _ in range(3))
    right, wrong = (F.group_norm(torch.cat((a, x), 1), 4) for x in (b, c))
    before = {"net/b.m [in.0]": torch.cat((a, b), 1), "net/a": a, "net/b": b, "net/c": c}
    parameters = {"weight": torch.ones(16), "bias": torch.zeros(16)}
    cause, text = found(right, wrong, before, parameters)
    assert cause == "another-value" and "net/a, net/c" in text


@pytest.mark.parametrize(
    ("axes", "says"),
    [((2,), "of each pixel alone"), ((0, 2, 3), "over the batch too")],
)
def test_statistics_of_a_group_norm(axes: tuple[int, ...], says: str) -> None:
    x = torch.randn(2, 4, 4, 30) + torch.randn(2, 4, 1, 1)  # batch, groups, channels, pixels
    wrong = (x - x.mean(axes, True)) / (x.var(axes, correction=0, keepdim=True) + 1e-6).sqrt()
    picture = x.reshape(2, 16, 6, 5)
    before = {"net/b.m [in.0]": picture}
    right = F.group_norm(picture, 4, torch.ones(16), torch.zeros(16), 1e-6)
    parameters = {"weight": torch.ones(16), "bias": torch.zeros(16)}
    assert says in found(right, wrong.reshape(picture.shape), before, parameters)[1]


def test_a_layer_with_another_weight() -> None:
    x = torch.randn(2, 40, 16)
    other = torch.randn(24, 16)
    before = {"net/b.m [in.0]": x}
    parameters = {"weight": WEIGHT, "bias": BIAS}
    right = F.linear(x, WEIGHT, BIAS)
    cause, text = found(right, F.linear(x, other, BIAS), before, parameters)
    assert cause == "weights-differ" and "another weight:" in text
    assert found(right, torch.randn(2, 40, 24), before, parameters)[0] != "weights-differ"
    low = F.linear(x.bfloat16().float(), WEIGHT.bfloat16().float(), BIAS)
    assert found(right, low, before, parameters)[0] == "rounded"
    zero = BIAS.expand(2, 40, 24)
    assert found(right, zero, before, parameters)[0] == "all-zero"


def test_parts_of_other_values() -> None:
    moments, raw = torch.randn(1, 8, 6, 6), torch.randn(1, 8, 6, 6)
    before = {"net/moments": moments, "net/raw": raw}
    cause, text = found(moments[:, :4], moments[:, ::2], before)
    assert cause == "another-chunk" and "even and odd channels" in text
    cause, text = found(moments[:, :4], raw[:, :4], before)
    assert cause == "another-value" and "of net/raw" in text


def test_pooled_tokens() -> None:
    before = {"net/normed": NORM, "net/x": X}
    assert found(NORM[:, 3], NORM.mean(1), before)[0] == "other-pooling"
    assert "the norm is missing" in found(NORM[:, 3], X[:, 3], before)[1]
