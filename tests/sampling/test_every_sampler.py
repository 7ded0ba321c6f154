"""What holds for every sampler in the registry, whatever its method."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.analytic import Mixture
from lydite.sampling.registry import SAMPLERS, find_sampler
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel, Step
from lydite.sampling.samplers.algebra import NEAR_ONE
from support.denoisers import FunctionDenoiser
from support.sampler_cases import AS_THE_PAPER, Paired

NOISE_MODELS = {"ve": VE, "flow": FLOW}
COUNTS = (1, 2, 3, 4, 7)
OWN_STEPS = {"dpm_fast", "dpm_adaptive"}  # of the sigmas given these take the ends alone
SHAPE = (2, 4, 3, 3)
DRAWN = np.random.default_rng(0).standard_normal((41, *SHAPE))
EACH = [
    (name, noise_model)
    for name, sampler in SAMPLERS.items()
    for noise_model in sampler.noise_models
]
STEADY = [
    (name, noise_model)
    for name, noise_model in EACH
    if SAMPLERS[name].noise == "none" and name != "ipndm_v"  # whose weights are not quite 1 in all
]
each = pytest.mark.parametrize(("name", "noise_model"), EACH)


def schedule(noise_model: str, steps: int, top: float = 14.6) -> list[float]:
    """Down to 0; a flow starts from pure noise, where λ has no end."""
    if noise_model == "flow":
        return np.linspace(1.0, 0.0, steps + 1).tolist()
    return [*(np.linspace(top ** (1 / 7), 0.03 ** (1 / 7), steps) ** 7).tolist(), 0.0]


def part(noise_model: str) -> list[float]:
    """A stretch that neither starts with pure noise nor ends without any."""
    return [5.0, 2.2, 0.9, 0.4] if noise_model == "ve" else [0.9, 0.7, 0.4, 0.15]


@dataclass
class Watched:
    """A denoiser that remembers what it was asked, with and without the prompt."""

    inner: Any
    noise_model: NoiseModel = VE
    sigmas: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.noise_model = self.inner.noise_model

    def __call__(self, x: Any, sigma: float) -> Any:
        self.sigmas.append(sigma)
        return self.inner(x, sigma)

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        guided = self(x, sigma)
        return guided, guided * 0.9 + 0.02


class Alike(FunctionDenoiser):
    """A function that sees the same with and without a prompt."""

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        return self(x, sigma), self(x, sigma)


def run(
    name: str,
    denoise: Any,
    sigmas: Any,
    make: Callable[[np.ndarray], Any] = np.array,
    shape: tuple[int, ...] = SHAPE,
    dtype: Any = np.float64,
) -> list[Step[Any]]:
    drawn = DRAWN.astype(dtype).reshape(-1, *shape)
    handed = cycle([make(each) for each in drawn[1:]])
    start = make(drawn[0] * dtype(sigmas[0]))
    return list(SAMPLERS[name].run(denoise, start, sigmas, noise=lambda *_: next(handed)))


@each
def test_any_number_of_steps_ends_in_a_finite_picture(name: str, noise_model: str):
    for sigmas in (*(schedule(noise_model, steps) for steps in COUNTS), part(noise_model)):
        steps = run(name, Watched(Mixture(noise_model=NOISE_MODELS[noise_model])), sigmas)
        assert steps
        for step in steps:
            assert np.isfinite(step.x).all()
            assert np.isfinite(step.denoised).all()
            assert step.x.shape == SHAPE


@each
def test_steps_say_where_they_are(name: str, noise_model: str):
    for sigmas in (schedule(noise_model, 4), part(noise_model)):
        steps = run(name, Watched(Mixture(noise_model=NOISE_MODELS[noise_model])), sigmas)
        walked = [steps[0].sigma, *(step.sigma_next for step in steps)]
        assert [step.index for step in steps] == list(range(len(steps)))
        assert all(before.sigma_next == after.sigma for before, after in pairwise(steps))
        assert {type(sigma) for sigma in walked} == {float}
        if name in OWN_STEPS:
            assert (walked[0], walked[-1]) == (sigmas[0], sigmas[-1] or sigmas[-2])
        else:
            assert walked[0] in (sigmas[0], NEAR_ONE)
            assert walked[1:] == sigmas[1:]


@each
def test_the_network_and_the_noise_are_asked_in_python_floats(name: str, noise_model: str):
    """np.float64 left of an MLX array would make it a NumPy array without a word."""
    denoise, asked = Watched(Mixture(noise_model=NOISE_MODELS[noise_model])), []

    def noise(*ends: float) -> np.ndarray:
        asked.extend(ends)
        return DRAWN[0]

    sigmas = np.array(schedule(noise_model, 7))
    steps = SAMPLERS[name].run(denoise, DRAWN[0], sigmas, noise=noise)  # type: ignore[arg-type]
    assert list(steps)
    assert {type(sigma) for sigma in denoise.sigmas} == {float}
    assert {type(sigma) for sigma in asked} <= {float}
    assert all(0 < sigma <= sigmas[0] for sigma in denoise.sigmas)
    assert bool(asked) == (SAMPLERS[name].noise != "none") or name == "restart"  # too few steps


@each
def test_the_number_of_calls_is_the_one_stated(name: str, noise_model: str):
    denoise, count = Watched(Mixture(noise_model=NOISE_MODELS[noise_model])), 24
    run(name, denoise, schedule(noise_model, count)[: count + 1])
    stated = SAMPLERS[name].calls
    if name != "dpm_adaptive":  # as many as the tolerance asks for
        assert (stated - 0.5) * count < len(denoise.sigmas) <= (stated + 0.5) * count


@each
def test_nothing_is_computed_until_it_is_asked_for(name: str, noise_model: str):
    denoise = Watched(Mixture(noise_model=NOISE_MODELS[noise_model]))
    handed = iter(DRAWN)
    steps = SAMPLERS[name].run(
        denoise, DRAWN[0], schedule(noise_model, 7), noise=lambda *_: next(handed)
    )
    assert denoise.sigmas == []
    next(steps)
    first = len(denoise.sigmas)
    assert first > 0
    list(steps)
    assert len(denoise.sigmas) > first


@each
def test_the_arrays_passed_in_are_not_written_into(name: str, noise_model: str):
    start, noise = DRAWN[0].copy(), DRAWN[1].copy()
    for array in (start, noise):
        array.setflags(write=False)
    denoise = Watched(Mixture(noise_model=NOISE_MODELS[noise_model]))
    steps = list(
        SAMPLERS[name].run(denoise, start, schedule(noise_model, 7), noise=lambda *_: noise)
    )
    kept = [step.x.copy() for step in steps]
    for step, x in zip(steps, kept, strict=True):  # nor is a step after it was handed out
        np.testing.assert_array_equal(step.x, x)
    assert len({id(step.x) for step in steps}) == len(steps)


@each
def test_values_do_not_depend_on_the_shape_around_them(name: str, noise_model: str):
    denoise = Watched(Mixture(noise_model=NOISE_MODELS[noise_model]))
    expected = run(name, denoise, schedule(noise_model, 4))[-1].x
    for shape in ((72,), (8, 9), (1, 72, 1), (2, 2, 2, 3, 3)):
        ours = run(name, denoise, schedule(noise_model, 4), shape=shape)[-1].x
        assert ours.shape == shape
        np.testing.assert_allclose(ours.reshape(SHAPE), expected, rtol=1e-12, atol=1e-12)


@each
def test_what_lies_on_the_straight_path_stays_on_it(name: str, noise_model: str):
    """Where D is the mean wherever one looks, every method goes to α(σ)·mean, without its noise."""
    denoise, options = (
        Paired(mean=0.7, noise_model=NOISE_MODELS[noise_model]),
        AS_THE_PAPER.get(name, {}),
    )
    for sigmas in (*(schedule(noise_model, steps) for steps in (1, 2, 5)), part(noise_model)):
        start = np.full((3,), denoise.noise_model.alpha(sigmas[0]) * 0.7)
        steps = list(
            SAMPLERS[name].run(denoise, start, sigmas, noise=lambda *_: np.zeros(3), **options)
        )
        bar = 1e-9 + sigmas[0] - steps[0].sigma  # for pure noise some take a little less
        for step in steps:
            due = denoise.noise_model.alpha(step.sigma_next) * 0.7
            np.testing.assert_allclose(step.x, due, rtol=0, atol=bar)


@pytest.mark.parametrize(
    ("share", "name", "noise_model"), [(s, *e) for s in (0.0, 1.0) for e in STEADY]
)
def test_a_denoiser_that_returns_nothing_or_x_itself_has_an_exact_answer(
    share: float, name: str, noise_model: str
):
    """D = 0 leaves x in proportion to sigma, D = x leaves it alone."""
    denoise = Alike(lambda x, sigma: x * share, NOISE_MODELS[noise_model])
    for sigmas in (schedule(noise_model, 5), part(noise_model)):
        steps = list(SAMPLERS[name].run(denoise, DRAWN[0], sigmas))
        for step in steps:
            due = DRAWN[0] * (1.0 if share else step.sigma_next / steps[0].sigma)
            np.testing.assert_allclose(step.x, due, rtol=0, atol=1e-9)


SOFT: dict[str, Any] = {"means": (-0.8, 0.6), "spread": 0.35}  # a rounding error stays small
ADAPTIVE_BAR = 5e-3  # a tenth of its tolerance: rounding moves its steps


def same_numbers_as_numpy(
    name: str,
    noise_model: str,
    xp: ModuleType,
    make: Callable[..., Any],
    back: Callable[[Any], np.ndarray],
) -> None:
    for steps in COUNTS:
        sigmas = schedule(noise_model, steps, top=3.0)
        ours, theirs = (
            run(
                name,
                Watched(Mixture(**SOFT, noise_model=NOISE_MODELS[noise_model], xp=room)),
                sigmas,
                made,
                dtype=np.float32,
            )
            for room, made in ((np, np.array), (xp, make))
        )
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            for a, b in ((mine.x, other.x), (mine.denoised, other.denoised)):
                assert type(b) is type(make(DRAWN[0].astype(np.float32)))
                assert a.dtype == back(b).dtype == np.float32
                bar = (ADAPTIVE_BAR if name == "dpm_adaptive" else 1e-5) * max(1, np.abs(a).max())
                np.testing.assert_allclose(back(b), a, rtol=0, atol=bar)


@each
def test_mlx_arrays_give_the_numbers_of_numpy(name: str, noise_model: str):
    same_numbers_as_numpy(name, noise_model, mx, mx.array, np.array)


@pytest.mark.parity
@each
def test_torch_tensors_give_the_numbers_of_numpy(name: str, noise_model: str):
    torch = pytest.importorskip("torch")
    same_numbers_as_numpy(name, noise_model, torch, torch.from_numpy, torch.Tensor.numpy)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_known_by_what_it_is(name: str):
    sampler = find_sampler(name)
    assert sampler.name == name
    assert set(sampler.noise_models) <= set(NOISE_MODELS)
    assert sampler.noise_models
    assert sampler.about and sampler.source and sampler.proofs
    assert (sampler.function.__doc__ or "").strip()


@pytest.mark.parametrize("name", [name for name in SAMPLERS if SAMPLERS[name].noise != "none"])
def test_a_random_sampler_asks_for_its_noise(name: str):
    sampler = SAMPLERS[name]
    noise_model = sampler.noise_models[0]
    with pytest.raises(InputError, match="pass a source of it"):
        sampler.run(
            Watched(Mixture(noise_model=NOISE_MODELS[noise_model])),
            DRAWN[0],
            schedule(noise_model, 3),
        )


@pytest.mark.parametrize(
    "name", [name for name in SAMPLERS if len(SAMPLERS[name].noise_models) == 1]
)
def test_a_sampler_refuses_the_noise_model_it_is_not_made_for(name: str):
    (noise_model,) = SAMPLERS[name].noise_models
    other = FLOW if noise_model == "ve" else VE
    with pytest.raises(InputError, match="lydite sampler list"):
        SAMPLERS[name].run(Watched(Mixture(noise_model=other)), DRAWN[0], [0.9, 0.0])


def test_a_name_nobody_has_is_refused():
    with pytest.raises(InputError, match="no sampler 'eular'"):
        find_sampler("eular")
