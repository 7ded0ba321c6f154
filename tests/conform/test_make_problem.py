"""Problems are made from names; what makes no problem is refused in one line."""

import math
from typing import Any

import numpy as np
import pytest

from lydite.conform.make_problem import PAIR_SCALE, ProblemSpec, make_problem
from lydite.conform.mistakes.other_method import model_of
from lydite.core.errors import InputError
from lydite.sampling.named_models import find_model


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"model": "flux", "prediction": "eps"}, "needs a model with a noise table, as sd15"),
        ({"prediction": "edm"}, "needs the model edm"),
        ({"model": "edm", "prediction": "cosmos"}, "needs the model cosmos"),
        ({"prediction": "x1"}, "this makes no problem"),
        ({"denoiser": "perfect"}, "expected one of zero, identity, gaussian, mixture"),
        ({"denoiser": "zero", "guidance": 2.0}, "changes nothing; use gaussian, mixture"),
        ({"guidance": math.inf}, "expected a finite number"),
        ({"sampler": "nobody"}, "no sampler 'nobody'"),
        ({"options": {"surprise": 1}}, "surprise"),
        ({"model": "flux", "sampler": "tcd", "options": {"below": "timestep"}}, "noise table"),
    ],
)
def test_what_makes_no_problem(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        make_problem(ProblemSpec(**spec))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "unit"),
    [({"schedule": "leading", "convention": "diffusers"}, True),
     ({"schedule": "trailing", "convention": "diffusers"}, False), ({}, False),
     ({"convention": "comfyui"}, True), ({"convention": "comfyui", "model": "flux"}, False),
     ({"convention": "comfyui", "model": "sd3"}, False)],
)  # fmt: skip
def test_the_start_is_as_wide_as_it_says(spec: dict[str, Any], unit: bool) -> None:
    problem = make_problem(ProblemSpec(steps=3, **spec))
    first = problem.sigmas[0]
    width = math.sqrt(1 + first**2) if unit else first
    assert np.allclose(problem.x, np.array(problem.noise) * width, rtol=1e-12)
    said = "sqrt(1 + sigmas[0]^2)" if unit else "sigmas[0]"
    assert problem.explanations["x"].endswith(f"noise * {said}")


@pytest.mark.parametrize("name", ["sd15", "flux", "edm", "cosmos"])
def test_a_problem_says_enough_to_find_its_model(name: str) -> None:
    problem = make_problem(ProblemSpec(None, model=name, steps=5))
    found, model = model_of(problem), find_model(name)
    assert found is not None and found.noise_model == model.noise_model
    sigmas = np.array(problem.sigmas[:-1])
    times = [[float(each.timestep_of(sigma)) for sigma in sigmas] for each in (found, model)]
    assert np.allclose(times[0], times[1]) and np.allclose(times[0], problem.timesteps, rtol=1e-6)


def test_the_users_setting_goes_before_the_conventions() -> None:
    for settings, ending in (({}, "append"), ({"ending": "replace"}, "replace")):
        spec = ProblemSpec(schedule="align_your_steps", convention="a1111", settings=settings)
        assert make_problem(spec).settings["ending"] == ending


def test_what_a_sampler_needs_is_in_its_problem() -> None:
    plain = make_problem(ProblemSpec("euler", steps=3))
    assert plain.guidance is None and not plain.normals
    assert {"guidance", "normals", "middle"}.isdisjoint(plain.explanations)
    pair = make_problem(ProblemSpec("euler_cfg_pp", steps=3))
    assert pair.guidance and pair.guidance.scale == PAIR_SCALE and "guidance" in pair.explanations
    random = make_problem(ProblemSpec("euler_ancestral", steps=3))
    assert len(random.normals) == 2 and "normals" in random.explanations  # the last adds none
    other = make_problem(ProblemSpec("euler_ancestral", steps=3, seed=1))
    assert other.noise != random.noise and other.normals[0] != random.normals[0]
    middle = make_problem(ProblemSpec("pndm", steps=5, options={"middle": "timestep"}))
    assert "timestep halfway" in middle.explanations["middle"]
