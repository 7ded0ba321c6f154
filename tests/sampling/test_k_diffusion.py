"""Samplers against the numbers of k-diffusion, which tools/record_k_diffusion.py wrote down."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.sampling.analytic import Gaussian, Mixture
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import Step
from lydite.sampling.samplers.algebra import Churn
from support.denoisers import FunctionDenoiser

GOLDEN = Path(__file__).parent / "golden"
FACTS: dict[str, Any] = json.loads((GOLDEN / "k_diffusion.json").read_text())
THEIRS: dict[str, np.ndarray] = dict(np.load(GOLDEN / "k_diffusion.npz"))
DENOISERS = {"gaussian": Gaussian(), "mixture": Mixture()}
NAMES = [key.removeprefix("single/") for key in THEIRS if key.startswith("single/")]
SIGMA_MAX = float(THEIRS["sigmas/karras"][0])
COARSE = {  # where k-diffusion's own float32 is off: √(σ² − up²) of two sigmas far apart
    ("dpm_2_ancestral", 2),
    ("dpm_2_ancestral", 3),
    ("dpmpp_2s_ancestral", 2),
}
OPTIONS = [
    (name, label)
    for name, variants in FACTS["options"].items()
    for label in variants
    if label != "churn" and name != "dpm_adaptive"
]


def schedule(spacing: str, steps: int) -> list[float]:
    before = sum(n + 1 for n in FACTS["steps"][: FACTS["steps"].index(steps)])
    return THEIRS[f"sigmas/{spacing}"][before : before + steps + 1].tolist()


def run(name: str, kind: str, sigmas: list[float], dtype: Any, **options: Any) -> list[Step[Any]]:
    handed = iter(THEIRS["noise"].astype(dtype))
    start = THEIRS["start"].astype(dtype)
    return list(
        SAMPLERS[name].run(DENOISERS[kind], start, sigmas, noise=lambda *_: next(handed), **options)
    )


def runs(name: str, precision: str) -> Iterator[tuple[str, str, int, np.ndarray]]:
    """What k-diffusion ran to the end: all but one step, where it crashes or returns its noise."""
    for row, kind in enumerate(FACTS["denoisers"]):
        for column, spacing in enumerate(FACTS["schedules"]):
            for place, steps in enumerate(FACTS["steps"]):
                if f"{name}/{steps}" not in FACTS["fails"] and (name, steps) != ("dpm_fast", 1):
                    yield kind, spacing, steps, THEIRS[f"{precision}/{name}"][row, column, place]


def test_every_sampler_of_k_diffusion_is_recorded():
    assert len(NAMES) == 13  # and dpm_adaptive, which has no number of steps
    assert set(NAMES) <= set(SAMPLERS)
    assert set(FACTS["options"]) - set(NAMES) == {"dpm_adaptive"}


@pytest.mark.parametrize("name", NAMES)
def test_float32_runs_end_where_k_diffusion_ends(name: str):
    pairs = zip(runs(name, "single"), runs(name, "double"), strict=True)
    for (kind, spacing, steps, theirs), (*_, exact) in pairs:
        ours = run(name, kind, schedule(spacing, steps), np.float32)[-1].x
        assert ours.dtype == theirs.dtype == np.float32
        bar = 1e-5 * max(1, np.abs(exact).max())  # what is left of x after two steps is large
        if (name, steps) in COARSE:
            bar += np.abs(theirs - exact).max()
        message = f"{kind}, {spacing}, {steps} steps"
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bar, err_msg=message)


@pytest.mark.parametrize("name", NAMES)
def test_float64_runs_end_where_k_diffusion_ends(name: str):
    for kind, spacing, steps, theirs in runs(name, "double"):
        ours = run(name, kind, schedule(spacing, steps), np.float64)[-1].x
        message = f"{kind}, {spacing}, {steps} steps"
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10, err_msg=message)


def test_one_step_is_the_denoised_image_also_where_k_diffusion_has_none():
    assert set(FACTS["fails"]) == {
        f"{name}/1" for name in ("dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde")
    }
    for name in NAMES:
        (step,) = run(name, "mixture", [SIGMA_MAX, 0.0], np.float64)
        expected = DENOISERS["mixture"](THEIRS["start"].astype(np.float64), SIGMA_MAX)
        np.testing.assert_allclose(step.x, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", DENOISERS)
def test_float64_runs_follow_k_diffusion_step_by_step(name: str, kind: str):
    theirs = THEIRS[f"path/{name}"][FACTS["denoisers"].index(kind)]
    steps = run(name, kind, schedule("karras", FACTS["path_steps"]), np.float64)
    ours = np.stack([THEIRS["start"], *(step.x for step in steps)])
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "label"), OPTIONS)
def test_options_mean_what_they_mean_in_k_diffusion(name: str, label: str):
    options = FACTS["options"][name][label]
    ours = run(name, "mixture", schedule("karras", FACTS["path_steps"]), np.float64, **options)
    np.testing.assert_allclose(
        ours[-1].x, THEIRS[f"options/{name}/{label}"], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ("euler", "heun", "dpm_2"))
def test_churn_adds_the_noise_of_k_diffusion(name: str):
    sigmas = schedule("karras", FACTS["path_steps"])
    options = FACTS["options"][name]["churn"]
    asked: list[tuple[float, float]] = []

    def noise(sigma: float, sigma_up: float) -> np.ndarray:
        asked.append((sigma, sigma_up))
        return THEIRS["noise"][sigmas.index(sigma)].astype(np.float64)

    ours = run(name, "mixture", sigmas, np.float64, churn=Churn(noise, **options))
    theirs = THEIRS[f"options/{name}/churn"]
    np.testing.assert_allclose(ours[-1].x, theirs, rtol=1e-12, atol=1e-12)
    lifted = [sigma for sigma in sigmas if 0.1 <= sigma <= 10]
    assert 0 < len(lifted) < len(sigmas) - 2  # both bounds leave a step out
    factor = 1 + options["s_churn"] / FACTS["path_steps"]
    assert asked == [(sigma, pytest.approx(sigma * factor, rel=1e-15)) for sigma in lifted]


@pytest.mark.parametrize("label", FACTS["options"]["dpm_adaptive"])
def test_dpm_adaptive_takes_the_steps_of_k_diffusion(label: str):
    options, info = FACTS["options"]["dpm_adaptive"][label], FACTS["dpm_adaptive"][label]
    calls: list[float] = []

    def counted(x: np.ndarray, sigma: float) -> np.ndarray:
        calls.append(sigma)
        return DENOISERS["mixture"](x, sigma)

    handed = iter(THEIRS["noise"].astype(np.float64))
    steps = list(
        SAMPLERS["dpm_adaptive"].run(
            FunctionDenoiser(counted),
            THEIRS["start"].astype(np.float64),
            schedule("karras", FACTS["path_steps"]),
            noise=lambda *_: next(handed),
            **options,
        )
    )
    assert len(steps) == info["n_accept"]
    assert len(calls) == info["nfe"] - info["n_reject"]  # a step tried again keeps its first call
    assert info["n_reject"] > 0
    theirs = THEIRS[f"options/dpm_adaptive/{label}"]
    np.testing.assert_allclose(steps[-1].x, theirs, rtol=1e-10, atol=1e-10)
