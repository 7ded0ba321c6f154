"""Guidance, steps of second order, settings of schedulers, pictures: what a loop gets wrong."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
)

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Recorded
from support.findings import evidence

torch.manual_seed(2)
OUTPUT = torch.randn(2, 8, 6, 5)  # without and with the prompt; the second half is a variance
U, C = OUTPUT.chunk(2)
SHAPE = (1, 4, 6, 5)


def found(
    right: torch.Tensor, wrong: torch.Tensor, before: dict[str, torch.Tensor] | None = None
) -> tuple[str, str]:
    """The first cause and its evidence; two empty texts where there is none."""
    values = [Recorded(path, value.numpy()) for path, value in (before or {}).items()]
    base = evidence(right.contiguous().numpy(), wrong.contiguous().numpy())
    e = type(base)(**{**vars(base), "before": lambda: values})
    return next(((f.cause, f.evidence) for f in find(e)), ("", ""))


def guided(u: torch.Tensor, c: torch.Tensor, weight: float) -> torch.Tensor:
    return u + weight * (c - u)


@pytest.mark.parametrize("cut", [slice(4), slice(None)])
@pytest.mark.parametrize(
    ("parts", "weight", "cause", "says"),
    [
        ((U, C), 4.0, "guidance-weight", "w = 4, one more"),
        ((U, C), 2.0, "guidance-weight", "w = 2, one less"),
        ((U, C), 5.5, "guidance-weight", "the port with w = 5.5"),
        ((C, U), 3.0, "guidance-exchanged", "exchanged"),
        ((U, C), 1.0, "guidance-missing", "without guidance"),
    ],
)
def test_guidance(
    parts: tuple[torch.Tensor, ...], weight: float, cause: str, says: str, cut: slice
) -> None:
    right, wrong = guided(U, C, 3.0)[:, cut], guided(parts[0], parts[1], weight)[:, cut]
    result = found(right, wrong, {"net [out]": OUTPUT})
    assert result[0] == cause and says in result[1]


@pytest.mark.parametrize(
    ("parts", "weight", "part", "cause", "says"),
    [
        ((U, C), 3.0, 0.0, "other-guidance", "a part of 0.7 of it rescaled"),
        ((U, C), 3.0, 0.4, "other-guidance", "the port rescales a part of 0.4"),
        ((C, U), 3.0, 0.7, "guidance-exchanged", "exchanged"),
        ((U, C), 5.0, 0.7, "guidance-weight", "the port has the weight 5"),
    ],
)
def test_guidance_with_a_rescaled_deviation(
    parts: tuple[torch.Tensor, ...], weight: float, part: float, cause: str, says: str
) -> None:
    def rescaled(u: torch.Tensor, c: torch.Tensor, w: float, share: float) -> torch.Tensor:
        both = guided(u, c, w)
        return share * both * (c.std() / both.std()) + (1 - share) * both

    right, wrong = rescaled(U, C, 3.0, 0.7), rescaled(parts[0], parts[1], weight, part)
    result = found(right, wrong, {"net [out]": OUTPUT})
    assert result[0] == cause and says in result[1]


def test_channels_of_a_prediction() -> None:
    right = guided(U, C, 3.0)
    for cut, says in ((slice(4, None), "second half"), (slice(0, None, 2), "every second channel")):
        result = found(right[:, :4], right[:, cut], {"net [out]": OUTPUT})
        assert result[0] == "another-chunk" and says in result[1]


def test_a_sum_of_other_values_is_no_guidance() -> None:
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    assert found(4 * x - 3 * y, 2 * x - y, {"net/x": x, "net/y": y})[0] == "other-factors"


X, NOW, THEN, OTHER = (torch.randn(1, 4, 8, 8) for _ in range(4))
STEP = {
    "p/sample, step 3": X,
    "p/x0, step 3": NOW,
    "p/x0, step 2": THEN,
    "p/eps, step 2": OTHER,
}


def step(k: float, then: torch.Tensor = THEN) -> torch.Tensor:
    return 0.8 * X + 0.3 * NOW + k * (NOW - then)


@pytest.mark.parametrize(
    ("wrong", "cause", "says"),
    [
        (step(0.0), "history-missing", "first order"),
        (step(-0.1), "term-negated", "sign"),
        (step(0.2), "second-order-term", "a factor 0.5 is missing"),
        (step(0.17), "second-order-term", "1.7 × the reference's"),
        (step(0.1, OTHER), "another-value", "the port takes p/eps, step 2"),
        (step(0.1) + 0.1 * X, "other-factors", "0.9 · p/sample"),
    ],
)
def test_steps_of_second_order(wrong: torch.Tensor, cause: str, says: str) -> None:
    result = found(step(0.1), wrong, STEP)
    assert result[0] == cause and says in result[1]


def test_a_step_from_something_else_is_not_explained() -> None:
    wrong = step(0.1) + 1e-2 * torch.randn(1, 4, 8, 8)
    assert found(step(0.1), wrong, STEP)[0] not in ("second-order-term", "other-factors")


def tables(scheduler: Any, **how: Any) -> dict[str, torch.Tensor]:
    usual: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012}
    usual |= {"beta_schedule": "scaled_linear"}
    made = scheduler(**{**usual, **how})
    made.set_timesteps(12)
    return {"timesteps": made.timesteps, "sigmas": getattr(made, "sigmas", torch.zeros(0))}


def table_finding(right: torch.Tensor, wrong: torch.Tensor) -> tuple[str, str]:
    reference, port = (np.asarray(x.double().numpy(), np.float32) for x in (right, wrong))
    e = evidence(reference, port, kind="schedule", floor=1e-7)
    return next(((f.cause, f.evidence) for f in find(e)), ("", ""))


@pytest.mark.parametrize(
    ("scheduler", "what", "how", "cause", "says"),
    [
        (EulerDiscreteScheduler, "sigmas", {"beta_schedule": "linear"}, "other-betas",
         "linear betas from 0.00085 to 0.012 in the port"),
        (EulerDiscreteScheduler, "sigmas", {"beta_end": 0.02}, "other-betas", "to 0.02 in the"),
        (EulerDiscreteScheduler, "sigmas", {"use_karras_sigmas": True}, "other-sigma-spacing",
         "Karras"),
        (EulerDiscreteScheduler, "timesteps", {"timestep_spacing": "trailing"},
         "timestep-spacing", "trailing spacing in the port"),
        (DPMSolverMultistepScheduler, "timesteps", {"timestep_spacing": "trailing"},
         "timestep-spacing", "trailing spacing in the port"),
        (DPMSolverMultistepScheduler, "sigmas", {"beta_schedule": "squaredcos_cap_v2"},
         "other-betas", "squared cosine"),
        (DDIMScheduler, "timesteps", {"timestep_spacing": "trailing"}, "timestep-spacing",
         "leading spacing in the reference"),
    ],
)  # fmt: skip
def test_settings_of_schedulers(
    scheduler: Any, what: str, how: dict[str, Any], cause: str, says: str
) -> None:
    right, wrong = tables(scheduler)[what], tables(scheduler, **how)[what]
    result = table_finding(right, wrong)
    assert result[0] == cause and says in result[1]
    assert table_finding(right, right) == ("", "")


def test_a_table_of_unknown_settings_is_not_named() -> None:
    right = tables(EulerDiscreteScheduler)["sigmas"]
    wrong = tables(EulerDiscreteScheduler, beta_end=0.0154)["sigmas"]
    assert table_finding(right, wrong)[0] != "other-betas"


PICTURE = 1.5 * torch.randn(1, 3, 16, 16)
RIGHT = (PICTURE / 2 + 0.5).clamp(0, 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (PICTURE.clamp(-1, 1), "The port is x clamped to −1 … 1"),
        (PICTURE / 2 + 0.5, "The port is x / 2 + 0.5, where"),
        (PICTURE.sigmoid(), "The port is sigmoid(x)"),
        ((PICTURE + 0.5).clamp(0, 1), "The port is x + 0.5 clamped"),
        (torch.floor(255 * RIGHT) / 255, "rounded down to 8 bits"),
        (255 * RIGHT, "· 127.5 clamped to 0 … 255"),
    ],
)
def test_ranges_of_pictures(wrong: torch.Tensor, says: str) -> None:
    cause, text = found(RIGHT, wrong, {"vae [out]": PICTURE})
    assert cause == "other-range" and says in text


def test_a_picture_that_is_off_by_a_little_names_no_range() -> None:
    wrong = (RIGHT + 4e-3 * torch.randn(1, 3, 16, 16)).clamp(0, 1)
    assert found(RIGHT, wrong, {"vae [out]": PICTURE})[0] != "other-range"


NOISE, NOISE_THEN = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)


def stochastic(
    k: float, factor: float = 0.5, noise: torch.Tensor = NOISE, *, first: bool = False
) -> torch.Tensor:
    """A step of second order whose sample has the noise of the step before in it."""
    history = 0.0 if first else k * (NOW - THEN + 0.4 * X - 0.7 * NOISE_THEN)
    return 0.8 * X + 0.3 * NOW + history + factor * noise


@pytest.mark.parametrize(
    ("right", "wrong", "cause", "says"),
    [
        (stochastic(0, first=True), stochastic(0, 0.0, first=True), "term-missing", "p/noise"),
        (stochastic(0, first=True), stochastic(0, 0.25, first=True), "other-factors", "0.5 ×"),
        (stochastic(0, first=True), stochastic(0, -0.5, first=True), "term-negated", "p/noise"),
        (
            stochastic(0, first=True),
            stochastic(0, 0.5, NOISE_THEN, first=True),
            "another-value",
            "takes p/noise, step 2",
        ),
        (stochastic(0.1), stochastic(0.0), "history-missing", "first order"),
        (stochastic(0.1), stochastic(0.2), "second-order-term", "a factor 0.5 is missing"),
        (stochastic(0.1), stochastic(0.1) + 0.1 * X + 0.1 * NOW, "other-factors", "p/noise"),
    ],
)
def test_steps_with_noise(right: torch.Tensor, wrong: torch.Tensor, cause: str, says: str) -> None:
    noises = {"p/noise, step 3": NOISE, "p/noise, step 2": NOISE_THEN}
    values = [
        *(Recorded(name, value.numpy()) for name, value in STEP.items()),
        *(Recorded(name, value.numpy(), is_input=True) for name, value in noises.items()),
    ]
    base = evidence(right.numpy(), wrong.numpy())
    e = type(base)(**{**vars(base), "before": lambda: values})
    first = find(e)[0]
    assert first.cause == cause and says in first.evidence


def test_predictions_of_one_batch_are_no_step_with_noise() -> None:
    # The network adds its input to what it returns: guidance is then a sum with the first noise.
    inner = torch.randn(2, 4, 8, 8)
    u, c = (inner + 0.6 * NOISE).chunk(2)
    values = [Recorded("net", torch.cat((u, c)).numpy()), Recorded("net/b", inner.numpy())]
    values.append(Recorded("p/noise", NOISE.numpy(), is_input=True))
    base = evidence((4.5 * c - 3.5 * u).numpy(), (4.5 * u - 2.0 * inner[1:]).numpy())
    e = type(base)(**{**vars(base), "before": lambda: values})
    assert not any(f.cause == "other-factors" and "p/noise" in f.evidence for f in find(e))
