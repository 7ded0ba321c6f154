"""Steps of samplers with the table of sigmas recorded: diffusers' schedulers, and wrong ones."""

from dataclasses import replace
from math import expm1, log, sqrt
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.schedulers import scheduling_ddim, scheduling_euler_ancestral_discrete

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Evidence, Recorded
from support.findings import evidence

torch.manual_seed(5)
NOISE, EXTRA = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)
OUTPUTS = [torch.randn(1, 4, 8, 8) for _ in range(3)]
STEPS = 6


def run(scheduler: Any, steps: int, **options: Any) -> list[torch.Tensor]:
    """The latents before the first step and after each."""
    scheduler.set_timesteps(STEPS)
    latents = [NOISE * scheduler.init_noise_sigma]
    for n in range(steps):
        step = scheduler.step(OUTPUTS[n], scheduler.timesteps[n], latents[-1], **options)
        latents.append(step.prev_sample)
    return latents


def at_step(
    latents: list[torch.Tensor],
    wrong: torch.Tensor,
    tables: dict[str, Any],
    *,
    noise: bool = False,
    name: str = "pipeline/latents",
) -> Evidence:
    """What is known about the last of these latents."""
    step = len(latents) - 2
    values = [Recorded("pipeline/output", OUTPUTS[step].numpy())]
    if noise:
        values.append(Recorded("pipeline/extra", EXTRA.numpy(), is_input=True))
    for n in range(step, 0, -1):
        values.append(Recorded(f"pipeline/latents, step {n - 1}", latents[n].numpy()))
        values.append(Recorded(f"pipeline/output, step {n - 1}", OUTPUTS[n - 1].numpy()))
    values.append(Recorded("pipeline/noise, step 0" * (step > 0) or "pipeline/noise",
                           latents[0].numpy(), is_input=True))  # fmt: skip
    return replace(
        evidence(latents[-1].numpy(), wrong.float().numpy(), floor=1e-6),
        name=name,
        before=lambda: values,
        tables=lambda: ((key, table.numpy()) for key, table in tables.items()),
        step=step,
    )


def said(e: Evidence) -> str:
    return next((f"{f.cause} {f.evidence}" for f in find(e)), "")


def multistep(ratio: float = 1.0, factor: float = 0.5, sign: float = 1.0) -> torch.Tensor:
    """The second step of DPM-Solver++ 2M, the power of the ratio of the steps as given."""
    scheduler = DPMSolverMultistepScheduler()
    x = [value.double() for value in run(scheduler, 1)]
    sigmas = [float(s) for s in scheduler.sigmas[:3]]
    alphas = [1 / sqrt(1 + s * s) for s in sigmas]
    pictures = [(v - s * a * o) / a for v, s, a, o in zip(x, sigmas, alphas, OUTPUTS, strict=False)]
    h, last = (log(sigmas[n] / sigmas[n + 1]) for n in (1, 0))
    slope = sign * (pictures[1] - pictures[0]) / (last / h) ** ratio
    shrink = expm1(-h)
    first = sigmas[2] * alphas[2] / (sigmas[1] * alphas[1]) * x[1]
    return first - alphas[2] * shrink * (pictures[1] + factor * slope)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (multistep(factor=0.0), "a step of first order"),
        (multistep(ratio=-1.0), "inverted"),
        (multistep(ratio=0.0), "without dividing by the ratio"),
        (multistep(factor=1.0), "a factor 0.5 is missing"),
        (multistep(sign=-1.0), "of the other sign"),
    ],
)
def test_multistep(wrong: torch.Tensor, says: str) -> None:
    scheduler = DPMSolverMultistepScheduler()
    latents = run(scheduler, 2)
    assert torch.allclose(multistep().float(), latents[-1], atol=1e-4)
    text = said(at_step(latents, wrong, {"sigmas": scheduler.sigmas}))
    assert text.startswith("other-step") and says in text and "(2M)" in text
    assert not said(at_step(latents, wrong, {})).startswith("other-step")  # no table, no formula


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"solver_type": "bh1"}, "the solver type bh1"),
        ({"disable_corrector": [0, 1]}, "without the corrector"),
        ({"solver_order": 1}, "a predictor of first order"),
    ],
)
def test_unipc(options: dict[str, Any], says: str) -> None:
    right, wrong = UniPCMultistepScheduler(), UniPCMultistepScheduler(**options)
    e = at_step(run(right, 2), run(wrong, 2)[-1], {"sigmas": right.sigmas})
    assert says in said(e) and "UniPC" in said(e)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda up, down: (up, None), "sigma_down, or the direction, is not reduced"),
        (lambda up, down: (down, up), "sigma_up and sigma_down exchanged"),
        (lambda up, down: (up**2, down), "without the square root"),
        (lambda up, down: (0.0, down), "without the noise"),
    ],
)
def test_ancestral(change: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = scheduling_euler_ancestral_discrete
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: EXTRA)
    scheduler = EulerAncestralDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    scheduler.is_scale_input_called = True
    latents = run(scheduler, 1)
    start, end = (float(s) for s in scheduler.sigmas[:2])
    up = sqrt(end**2 * (start**2 - end**2) / start**2)
    spread, down = change(up, sqrt(end**2 - up**2))
    wrong = latents[0] + OUTPUTS[0] * ((end if down is None else down) - start) + spread * EXTRA
    e = at_step(latents, wrong, {"sigmas": scheduler.sigmas}, noise=True)
    assert says in said(e)


def test_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling_ddim, "randn_tensor", lambda *_, **__: EXTRA)
    scheduler = DDIMScheduler(clip_sample=False, set_alpha_to_one=False)
    latents, other = (run(scheduler, 1, eta=eta) for eta in (0.5, 1.0))
    e = at_step(latents, other[-1], {"times": scheduler.timesteps.float()}, noise=True)
    assert "with eta 0.5" in said(e) and "that with eta 1;" in said(e)


def test_levels_of_flow_matching() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(STEPS)
    sigmas: Any = scheduler.sigmas
    latents = [NOISE, NOISE + (sigmas[1] - sigmas[0]) * OUTPUTS[0]]
    tables = {"sigmas": sigmas}
    back = said(at_step(latents, NOISE - (sigmas[1] - sigmas[0]) * OUTPUTS[0], tables))
    later = said(at_step(latents, NOISE + (sigmas[2] - sigmas[1]) * OUTPUTS[0], tables))
    assert "in the other direction" in back and "sigmas of another index" in later
    inside = at_step(latents, 2 * NOISE, tables, name="net/blocks.0.norm")
    assert not said(inside).startswith("other-step")  # no step inside of a network
