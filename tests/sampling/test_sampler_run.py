"""`Sampler.run`: sigmas it takes and refuses, options, and noise that only eta asks for."""

from itertools import cycle

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE
from support.sampler_cases import Paired

NOISE_MODELS = {"ve": VE, "flow": FLOW}
EACH = [
    (name, noise_model)
    for name, sampler in SAMPLERS.items()
    for noise_model in sampler.noise_models
]
WITH_ETA = [name for name in SAMPLERS if SAMPLERS[name].noise_with_eta]
DRAWN = np.random.default_rng(0).standard_normal((24, 6))
SIGMAS = {"ve": [9.0, 4.0, 1.5, 0.6, 0.2], "flow": [1.0, 0.8, 0.55, 0.3, 0.1]}


def test_these_samplers_add_noise_only_with_eta():
    """Whoever has an `eta` that is 0 by default, and nobody else."""
    still = [name for name in SAMPLERS if SAMPLERS[name].options.get("eta") == 0]
    assert still == WITH_ETA == ["dpm_fast", "dpm_adaptive", "ddim", "ddim_cfg_pp"]


@pytest.mark.parametrize("name", WITH_ETA)
def test_noise_is_asked_for_where_eta_does_and_makes_a_difference(name: str):
    sampler, asked = SAMPLERS[name], []

    def noise(*ends: float) -> np.ndarray:
        asked.append(ends)
        return DRAWN[len(asked)]

    def last(eta: float) -> np.ndarray:
        *_, step = sampler.run(Paired(), DRAWN[0] * 9, [*SIGMAS["ve"], 0.0], noise=noise, eta=eta)
        return step.x

    assert sampler.noise_for({}) == sampler.noise_for({"eta": 0.0}) == "none"
    assert sampler.noise_for({"eta": 0.5}) == "stream"
    without = last(0.0)
    assert asked == []
    assert np.abs(last(0.5) - without).max() > 1e-3
    assert len(asked) > 0
    with pytest.raises(InputError, match="pass a source of it"):
        sampler.run(Paired(), DRAWN[0], SIGMAS["ve"], eta=0.5)


@pytest.mark.parametrize(("name", "noise_model"), EACH)
def test_the_last_sigma_may_repeat(name: str, noise_model: str):
    """Some of diffusers' schedules end so; CFG++, correctors and the end of a group still move."""
    sigmas, normals = SIGMAS[noise_model], cycle(DRAWN[1:])
    steps = list(
        SAMPLERS[name].run(
            Paired(noise_model=NOISE_MODELS[noise_model]),
            DRAWN[0] * sigmas[0],
            [*sigmas, sigmas[-1]],
            noise=lambda *_: next(normals),
        )
    )
    assert all(np.isfinite(step.x).all() for step in steps)
    if name in ("euler", "lms", "dpmpp_2m", "dpmpp_2m_sde_heun", "dpmpp_3m_sde"):
        np.testing.assert_allclose(steps[-1].x, steps[-2].x, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([5.0, 2.0, 2.0, 1.0, 0.0], r"sigmas 1 and 2 are both 2\.0"),
        ([5.0, 5.0, 2.0], r"sigmas 0 and 1 are both 5\.0"),
        ([5.0, 5.0], r"sigmas 0 and 1 are both 5\.0"),
        ([5.0, 1.0, 0.0, 0.0], r"sigmas 2 and 3 are both 0\.0"),
        ([5.0, float("nan"), 0.0], "sigma 1 is nan"),
        ([float("inf"), 1.0, 0.0], "sigma 0 is inf"),
        ([5.0, -1.0], r"sigma 1 is -1\.0"),
        ([5.0], "1 sigmas; a step needs two"),
        ([], "0 sigmas; a step needs two"),
    ],
)
def test_sigmas_that_go_nowhere_are_refused(sigmas: list[float], message: str):
    for name, sampler in SAMPLERS.items():
        with pytest.raises(InputError, match=message) as caught:
            sampler.run(Paired(), DRAWN[0], sigmas, noise=lambda *_: DRAWN[1])
        assert name in str(caught.value)


def test_an_option_nobody_has_is_refused():
    with pytest.raises(InputError, match="sampler ddim has no option 'etta'; it has eta"):
        SAMPLERS["ddim"].run(Paired(), DRAWN[0], [5.0, 0.0], etta=1.0)


@pytest.mark.parametrize(("name", "noise_model"), EACH)
def test_a_sampler_goes_on_from_the_x_that_the_caller_leaves(name: str, noise_model: str) -> None:
    """Which is how injected latents enter a run."""

    def last(change: float) -> np.ndarray:
        normals = cycle(DRAWN)
        steps = SAMPLERS[name].run(
            Paired(noise_model=NOISE_MODELS[noise_model]),
            DRAWN[0],
            SIGMAS[noise_model],
            noise=lambda *_: next(normals),
        )
        step = next(steps)
        step.x = step.x + change
        *_, step = [step, *steps]
        return step.x

    assert np.abs(last(0.5) - last(0.0)).max() > 1e-6  # some steps forget most of it
