"""What img2img strength means: worked by hand, and diffusers' pipelines."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lydite.core.errors import InputError
from lydite.sampling.program_conventions import MEANINGS, strength_steps


@pytest.mark.parametrize(
    ("meaning", "strength", "made", "run"),
    (
        ("diffusers", 0.6, 28, 16),
        ("diffusers_sd3", 0.6, 28, 17),
        ("comfyui", 0.6, 46, 28),
        ("comfyui", 0.99995, 28, 28),
        ("a1111", 0.6, 28, 17),
        ("a1111", 0.9999, 28, 28),
    ),
)
def test_each_meaning_by_hand(meaning: Any, strength: float, made: int, run: int):
    assert strength_steps(meaning, 28, strength) == (made, run)


@given(
    meaning=st.sampled_from(sorted(MEANINGS)),
    steps=st.integers(1, 200),
    strength=st.floats(0.01, 1.0),
)
def test_no_meaning_runs_more_than_it_makes(meaning: Any, steps: int, strength: float):
    try:
        made, run = strength_steps(meaning, steps, strength)
    except InputError as error:
        assert "leaves none" in str(error)
        return
    assert 1 <= run <= made
    assert run <= steps <= made


@pytest.mark.parametrize("meaning", MEANINGS)
def test_without_an_image_every_step_runs(meaning: Any):
    assert strength_steps(meaning, 20, 1.0) == (20, 20)


@pytest.mark.parity
@pytest.mark.parametrize("steps", (1, 2, 7, 20, 50))
def test_the_pipelines_of_diffusers(steps: int):
    diffusers = pytest.importorskip("diffusers")
    pipelines = {
        "diffusers": diffusers.StableDiffusionImg2ImgPipeline,
        "diffusers_sd3": diffusers.StableDiffusion3Img2ImgPipeline,
    }
    for (meaning, pipeline), percent in ((p, s) for p in pipelines.items() for s in range(1, 101)):
        scheduler = SimpleNamespace(timesteps=list(range(steps)), order=1)
        _, count = pipeline.get_timesteps(
            SimpleNamespace(scheduler=scheduler), steps, percent / 100, None
        )
        if count == 0:
            with pytest.raises(InputError, match="leaves none"):
                strength_steps(meaning, steps, percent / 100)  # pyright: ignore[reportArgumentType]
        else:
            ours = strength_steps(meaning, steps, percent / 100)  # pyright: ignore[reportArgumentType]
            assert ours == (steps, count)


@pytest.mark.parametrize("strength", (0, -0.1, 1.1, float("nan")))
def test_a_strength_outside_is_refused(strength: float):
    with pytest.raises(InputError, match=f"strength is {strength}; expected"):
        strength_steps("comfyui", 20, strength)


def test_an_unknown_meaning_is_refused():
    with pytest.raises(InputError, match="strength means 'forge'; expected one of diffusers"):
        strength_steps("forge", 20, 0.5)  # pyright: ignore[reportArgumentType]
