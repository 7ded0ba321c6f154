"""Tables of positions, embeddings of time, and norms: with diffusers' own functions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_2d_sincos_pos_embed, get_timestep_embedding

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Recorded
from support.findings import evidence

torch.manual_seed(3)
TOKENS = torch.randn(2, 24, 64)
PICTURE = torch.randn(2, 16, 6, 5)
WEIGHT, BIAS = torch.rand(16) + 0.5, torch.randn(16)


def found(
    right: torch.Tensor,
    wrong: torch.Tensor,
    before: dict[str, torch.Tensor] | None = None,
    parameters: dict[str, torch.Tensor] | None = None,
) -> tuple[str, str]:
    """The first cause and its evidence; two empty texts where there is none."""
    values = [Recorded(path, value.numpy()) for path, value in (before or {}).items()]
    e = replace(
        evidence(right.numpy(), wrong.numpy()),
        before=lambda: values,
        parameters=lambda: {n: p.double().numpy() for n, p in (parameters or {}).items()},
    )
    return next(((f.cause, f.evidence) for f in find(e)), ("", ""))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: torch.floor(t), "rounded down to a whole number"),
        (lambda t: t + 1, "plus 1"),
        (lambda t: 1000 - t, "subtracted from 1000"),
        (lambda t: 10 * t, "times 10"),
        (lambda t: 1 / t, "the inverse of it"),
    ],
)
def test_another_time(change: Any, says: str) -> None:
    time = torch.tensor([437.5, 12.25])
    right, wrong = (get_timestep_embedding(t, 64, True, 0) for t in (time, change(time)))
    cause, text = found(right, wrong, {"net/t": time})
    assert cause == "other-time" and says in text
    assert found(right, right.flip(0), {"net/t": time})[0] != "other-time"
    noise = wrong + 0.1 * torch.randn(2, 64)
    assert found(right, noise, {"net/t": time})[0] != "other-time"


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (
            lambda t: t.max().expand(len(t)),
            "the time 437.5, the reference that of 0 in 32 of 96 rows",
        ),
        (lambda t: t / 8, "times 0.125"),
    ],
)
def test_each_token_has_a_time_of_its_own(own: Any, says: str) -> None:
    time = torch.cat([torch.zeros(32), torch.full((64,), 437.5)])
    right, wrong = (get_timestep_embedding(t, 64, True, 0) for t in (time, own(time)))
    cause, text = found(right, wrong, {"net/t": time})
    assert cause == "other-time" and says in text


def joined(time: float, guidance: float, less: float = 0) -> torch.Tensor:
    """Sinusoids of a time and a guidance beside those of the rows, as Chroma's."""
    own = get_timestep_embedding(torch.tensor([time]), 16, True, less)
    other = get_timestep_embedding(torch.tensor([guidance]), 16, True, 0)
    rows = get_timestep_embedding(torch.arange(12.0), 32, True, 0)
    return torch.cat([own.expand(12, -1), other.expand(12, -1), rows], -1)[None]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (joined(437.5, 0, less=1), "In channels 0 to 15 of 64: The port is a sinusoid of net/t"),
        (joined(37.5, 0), "the time 37.5, the reference that of 437.5"),
        (joined(437.5, 400), "the sinusoid of 400, the reference that of 0"),
    ],
)
def test_one_of_several_sinusoids(wrong: torch.Tensor, says: str) -> None:
    right, before = joined(437.5, 0), {"net/t": torch.tensor([437.5]), "net/ids": torch.zeros(12)}
    assert says in found(right, wrong, before)[1]
    noise = right.clone()
    noise[..., :16] = torch.randn(16)
    assert found(right, noise, before)[0] != "other-time"


MEAN, DEVIATION = torch.randn(4), torch.rand(4) + 0.5
LATENTS = torch.randn(1, 4, 6, 8)
PACKED = LATENTS.reshape(1, 4, 3, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 12, 16)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (lambda x, m, s: x / s + m, "x / a + b (it divides where the reference multiplies"),
        (lambda x, m, s: x * s * s + m, "a² · x + b (the variance"),
        (lambda x, m, s: (x + m) * s, "a · x + a · b"),
        (lambda x, m, s: x * s - m, "a · x − b"),
    ],
)
@pytest.mark.parametrize("given", [LATENTS, PACKED])
def test_latents_normalised_by_channel(own: Any, says: str, given: torch.Tensor) -> None:
    m, s = MEAN[:, None, None], DEVIATION[:, None, None]
    right = LATENTS * s + m
    cause, text = found(right, own(LATENTS, m, s), {"pipeline/latents": given})
    assert cause == "other-normalization" and says in text
    noise = right + 0.1 * torch.randn(right.shape)
    assert found(right, noise, {"pipeline/latents": given})[0] != "other-normalization"


def table(scale: float = 1.0) -> torch.Tensor:
    made = get_2d_sincos_pos_embed(
        64, (4, 6), interpolation_scale=scale, base_size=4, output_type="pt"
    )
    return torch.as_tensor(made).float()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (table(2.0), "of positions times 0.5"),
        (torch.cat(table().chunk(2, -1)[::-1], -1), "x and y are exchanged"),
        (torch.cat([table().chunk(4, -1)[n] for n in (1, 0, 3, 2)], -1), "cosines first"),
    ],
)
def test_tables_of_sines_and_cosines(wrong: torch.Tensor, says: str) -> None:
    assert says in found(TOKENS + table(), TOKENS + wrong, {"net/x": TOKENS})[1]
    assert says in found(table(), wrong)[1]  # the table alone


def test_a_learned_table_is_no_table_of_sines() -> None:
    learned = torch.randn(24, 64)
    cause, _ = found(TOKENS + learned, TOKENS + learned.flip(0), {"net/x": TOKENS})
    assert cause != "other-position-table"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (F.layer_norm(PICTURE.movedim(1, -1), (16,), WEIGHT, BIAS, 1e-6).movedim(-1, 1),
         "layer norm of the channels at each pixel"),
        (F.instance_norm(PICTURE, weight=WEIGHT, bias=BIAS, eps=1e-6), "instance norm"),
        (F.group_norm(PICTURE, 8, WEIGHT, BIAS, 1e-6), "group norm of 8 groups"),
    ],
)  # fmt: skip
def test_norms_of_pictures(wrong: torch.Tensor, says: str) -> None:
    right = F.group_norm(PICTURE, 4, WEIGHT, BIAS, 1e-6)
    known = {"weight": WEIGHT, "bias": BIAS}
    cause, text = found(right, wrong.contiguous(), {"m [in.0]": PICTURE}, known)
    assert cause == "other-norm" and says in text.partition(", the reference")[0]


X = torch.randn(2, 12, 16) + 1


def gemma(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (16,), 1 + WEIGHT, 1e-6)


@pytest.mark.parametrize(
    ("wrong", "cause", "says"),
    [
        (F.layer_norm(X, (16,), 1 + WEIGHT, eps=1e-6), "other-norm", "port is a layer norm"),
        (F.rms_norm(X, (16,), WEIGHT, 1e-6), "norm-affine", "its weight instead of 1 + weight"),
        (F.rms_norm(X.unflatten(-1, (4, 4)), (4,), eps=1e-6).flatten(-2) * (1 + WEIGHT),
         "other-norm", "each of 4 heads apart"),
    ],
)  # fmt: skip
def test_norms_with_one_plus_their_weight(wrong: torch.Tensor, cause: str, says: str) -> None:
    result = found(gemma(X), wrong, {"m [in.0]": X}, {"weight": WEIGHT})
    assert result[0] == cause and says in result[1]
    other = gemma(X) + 0.01 * torch.randn(2, 12, 16)
    assert found(gemma(X), other, {"m [in.0]": X}, {"weight": WEIGHT})[0] != cause


def test_the_time_of_another_step() -> None:
    def waves(time: float) -> torch.Tensor:
        return get_timestep_embedding(1000 * torch.full((2,), time), 64, flip_sin_to_cos=True,
                                      downscale_freq_shift=0)  # fmt: skip

    values = [Recorded("net/time [in.0]", torch.full((2,), 0.75).numpy())]
    tables = [("pipeline/sigmas", torch.tensor([0.75, 0.31]).numpy())]
    e = replace(
        evidence(waves(0.75).numpy(), waves(0.31).numpy()),
        before=lambda: values,
        tables=lambda: tables,
    )
    assert "entry 1 of the table pipeline/sigmas: the time of another step" in find(e)[0].evidence


def test_a_norm_of_each_head_where_the_references_is_of_all() -> None:
    weight = torch.rand(16) + 0.5
    right = F.rms_norm(X, (16,), weight, 1e-6)
    wrong = F.rms_norm(X.unflatten(-1, (4, 4)), (4,), eps=1e-6).flatten(-2) * weight
    cause, text = found(right, wrong, {"m [in.0]": X}, {"weight": weight})
    assert cause == "other-norm" and "over all channels, those of all heads together" in text
