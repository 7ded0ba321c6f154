"""Samplers against the numbers of ComfyUI, which tools/record_comfyui.py wrote down.

Its samplers ran in float64 on a two-mode mixture, the CFG++ ones with a Gaussian for the
unconditional prediction, with recorded noise.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.sampling.analytic import Gaussian, Mixture
from lydite.sampling.denoiser import cfg
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel
from lydite.sampling.samplers import cfg_pp, er_sde, gradient_estimation, res, seeds_solver

GOLDEN = Path(__file__).parent / "golden"
FACTS: dict[str, Any] = json.loads((GOLDEN / "comfyui.json").read_text())
THEIRS: dict[str, np.ndarray] = dict(np.load(GOLDEN / "comfyui.npz"))
NOISE_MODELS = {"ve": VE, "flow": FLOW}
SCHEDULES = ("1", "2", "3", "4", "7", "20", "part")  # "part" neither starts nor ends at an end
FAMILIES = (res, gradient_estimation, er_sde, seeds_solver, cfg_pp)
NAMES = sorted({key.split("/")[0] for key in FACTS["rows"]})
FROM_COMFYUI = [
    sampler.name for family in FAMILIES for sampler in family.METHODS if sampler.name in NAMES
]
FROM_ELSEWHERE = [name for name in NAMES if name not in FROM_COMFYUI]

HALF = {"eta": 0.5, "s_noise": 0.9}
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {  # our options for a recorded label
    ("res_multistep_ancestral", "half"): HALF,
    ("res_multistep_ancestral_cfg_pp", "half"): HALF,
    ("euler_ancestral_cfg_pp", "half"): HALF,
    ("dpmpp_2s_ancestral_cfg_pp", "half"): HALF,
    ("exp_heun_2_x0_sde", "half"): HALF,
    ("exp_heun_2_x0", "phi_1"): {"solver": "phi_1"},
    ("seeds_2", "half"): HALF | {"r": 0.7},
    ("seeds_2", "phi_2"): {"solver": "phi_2"},
    ("seeds_3", "half"): HALF | {"r_1": 0.25, "r_2": 0.8},
    ("gradient_estimation", "gamma"): {"gamma": 1.4},
    ("gradient_estimation_cfg_pp", "gamma"): {"gamma": 1.4},
    ("er_sde", "one"): {"stages": 1},
    ("er_sde", "two"): {"stages": 2, "s_noise": 0.9},
    ("er_sde", "ode"): {"noise_scaling": lambda ratio: ratio},
    ("er_sde", "sde"): {"noise_scaling": lambda ratio: ratio**2},
}
SHIFTED = 3 * 0.9999 / (1 + 2 * 0.9999)  # what a model of shift 3 has for 1 in ComfyUI
# In float64 too ComfyUI's er_sde weighs in float32, and adds √(rounding) of noise to its ODE; its
# deis integrates by ten thousand rectangles.
ROUGH = {"er_sde": 5e-7, "deis": 5e-5}


@dataclass(frozen=True)
class Way:
    """How a sampler of ours is asked for what ComfyUI does under its name."""

    options: Callable[[NoiseModel, Sequence[float]], dict[str, Any]] = lambda model, sigmas: {}
    first: float = 1.0  # in place of a sigma of 1
    last: float = 0.0  # in place of a sigma of 0
    as_ve: bool = False  # a flow model taken for a VE one: on the ODE, other steps
    name: str = ""  # ours, where it is another


def comfyui_sa_solver(noise_model: NoiseModel, sigmas: Sequence[float]) -> dict[str, Any]:
    high, low = FACTS["tau_interval"][noise_model.name]
    return {
        "predictor_order": 3,
        "corrector_order": 4,
        "simple_order_2": False,
        "taper": (-1, 0) if sigmas[-1] == 0 else None,
        "tau": lambda sigma, sigma_next: 1.0 if low <= sigma_next <= high else 0.0,
    }


def comfyui_uni_pc(noise_model: NoiseModel, sigmas: Sequence[float]) -> dict[str, Any]:
    return {"order": max(1, min(3, len(sigmas) - 2))}


NEAR_ONE = Way(first=0.9999)
WAYS = {
    "lms": Way(lambda noise_model, sigmas: {"euler_at_end": True}),
    "ipndm": Way(lambda noise_model, sigmas: {"end": "denoised"}),
    "deis": Way(name="deis_tab"),
    "dpmpp_2m": Way(as_ve=True),
    "dpmpp_sde": NEAR_ONE,
    "dpmpp_2m_sde": NEAR_ONE,
    "dpmpp_2m_sde_heun": NEAR_ONE,
    "dpmpp_3m_sde": NEAR_ONE,
    "sa_solver": Way(comfyui_sa_solver, first=0.9999),
    "sa_solver_pece": Way(comfyui_sa_solver, first=0.9999),
    "uni_pc": Way(comfyui_uni_pc, last=0.001, as_ve=True),
    "uni_pc_bh2": Way(comfyui_uni_pc, last=0.001, as_ve=True),
}
NO_STEP = "ComfyUI's order is one less than the steps: at one step it only rescales x"
NAN = "from pure noise ComfyUI's split is 0·∞, and its min() then renoises all, whatever eta"
DIFFERENT = {  # what no option makes equal, and why
    ("uni_pc", "ve"): {"1": NO_STEP},
    ("uni_pc", "flow"): {"1": NO_STEP},
    ("uni_pc_bh2", "ve"): {"1": NO_STEP},
    ("uni_pc_bh2", "flow"): {"1": NO_STEP},
    ("euler_ancestral_cfg_pp", "flow"): {"half": NAN},
}


@dataclass(frozen=True)
class Pair:
    """The denoisers of the record, for arrays of `xp`."""

    model: NoiseModel
    noise_model: NoiseModel
    xp: Any = np

    def __call__(self, x: Any, sigma: float) -> Any:
        return Mixture(**FACTS["denoiser"]["cond"], noise_model=self.model, xp=self.xp)(x, sigma)

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        uncond = Gaussian(**FACTS["denoiser"]["uncond"], noise_model=self.model)(x, sigma)
        return cfg(uncond, self(x, sigma), FACTS["denoiser"]["cfg"]), uncond


@dataclass
class Draws:
    """The recorded noise, in the order in which it is asked for."""

    make: Callable[[Any], Any]
    asked: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, sigma: float, sigma_next: float) -> Any:
        self.asked.append((sigma, sigma_next))
        return self.make(THEIRS["noise"][len(self.asked) - 1])


def theirs(name: str, noise_model: str, label: str) -> np.ndarray:
    start, stop = FACTS["rows"][f"{name}/{noise_model}"][label]
    return THEIRS[f"{name}/{noise_model}"][start:stop]


def in_float64(values: Any) -> Any:
    return np.asarray(values, np.float64)


def ours(
    name: str,
    noise_model: str,
    schedule: str,
    make: Callable[[Any], Any] = in_float64,
    *,
    way: Way | None = None,
    xp: Any = np,
    **options: Any,
) -> tuple[list[Any], Draws]:
    way = way or Way()
    draws = Draws(make)
    sigmas: list[float] = THEIRS[f"sigmas/{noise_model}/{schedule}"].tolist()
    x = make(THEIRS["start"]) * sigmas[0]
    options = way.options(NOISE_MODELS[noise_model], sigmas) | options
    ends: dict[float, float] = {1.0: way.first, 0.0: way.last}
    sigmas = [ends.get(sigma, sigma) for sigma in sigmas]
    denoise = Pair(NOISE_MODELS[noise_model], VE if way.as_ve else NOISE_MODELS[noise_model], xp)
    steps = SAMPLERS[way.name or name].run(denoise, x, sigmas, noise=draws, **options)
    return [step.x for step in steps], draws


def distance(states: Sequence[Any], wanted: np.ndarray) -> float:
    return float(np.abs(np.stack(states)[-len(wanted) :] - wanted).max())


def runs(names: Sequence[str], *labels: str) -> list[tuple[str, str, str]]:
    found = [(*key.split("/"), label) for key, rows in FACTS["rows"].items() for label in rows]
    return [
        (name, noise_model, label)
        for name, noise_model, label in found
        if name in names and label in labels and label not in DIFFERENT.get((name, noise_model), {})
    ]


@pytest.mark.parametrize(("name", "noise_model", "schedule"), runs(FROM_COMFYUI, *SCHEDULES))
def test_every_step_is_comfyuis(name: str, noise_model: str, schedule: str):
    wanted = theirs(name, noise_model, schedule)
    states, _ = ours(name, noise_model, schedule)
    assert distance(states, wanted) < ROUGH.get(name, 1e-11)
    states, _ = ours(name, noise_model, schedule, np.float32)
    assert all(state.dtype == np.float32 for state in states)
    assert distance(states, wanted) < 1e-5


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize(("name", "label"), list(VARIANTS))
def test_options_mean_what_they_mean_in_comfyui(name: str, label: str, noise_model: str):
    for schedule, recorded in (("7", label), ("part", f"{label} part")):
        if recorded not in DIFFERENT.get((name, noise_model), {}):
            states, _ = ours(name, noise_model, schedule, **VARIANTS[name, label])
            wanted = theirs(name, noise_model, recorded)
            assert distance(states, wanted) < ROUGH.get(name, 1e-11)


@pytest.mark.parametrize("name", [name for name, *_ in runs(FROM_COMFYUI, "shift")])
def test_where_pure_noise_starts_depends_on_the_models_shift(name: str):
    wanted = theirs(name, "flow", "shift")
    assert distance(ours(name, "flow", "7", near_one=SHIFTED)[0], wanted) < 1e-7
    assert distance(ours(name, "flow", "7")[0], wanted) > 1e-6


ASKED = FACTS["noise_asked_for_in_4_steps"]
DRAWN_FOR_NOTHING = ("res_multistep", "res_multistep_cfg_pp")  # ComfyUI multiplies it by 0


@pytest.mark.parametrize("key", list(ASKED))
def test_noise_is_asked_for_between_the_same_sigmas(key: str):
    name, noise_model = key.split("/")
    asked = np.array(ours(name, noise_model, "4", way=WAYS.get(name))[1].asked)
    wanted = np.array([] if name in DRAWN_FOR_NOTHING else ASKED[key])
    if name == "exp_heun_2_x0_sde":  # the second draw goes unused, and a path has none from σ to σ
        wanted[1::2, 0] = wanted[::2, 0]
    np.testing.assert_allclose(asked, wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("name", "noise_model", "schedule"), runs(FROM_ELSEWHERE, *SCHEDULES))
def test_names_from_elsewhere_end_where_comfyuis_do(name: str, noise_model: str, schedule: str):
    states, _ = ours(name, noise_model, schedule, way=WAYS.get(name))
    assert distance(states[-1:], theirs(name, noise_model, schedule)[-1:]) < ROUGH.get(name, 1e-9)


@pytest.mark.parametrize(("name", "noise_model"), list(DIFFERENT))
def test_what_is_said_to_differ_differs(name: str, noise_model: str):
    for label in DIFFERENT[name, noise_model]:
        schedule = label if label in SCHEDULES else "7"
        options = VARIANTS.get((name, label), {})
        states, _ = ours(name, noise_model, schedule, way=WAYS.get(name, Way()), **options)
        assert distance(states[-1:], theirs(name, noise_model, label)[-1:]) > 1e-4


def test_every_run_of_the_record_is_compared():
    labels = {(name, label) for name, label in VARIANTS} | {
        (name, f"{label} part") for name, label in VARIANTS
    }
    for key, rows in FACTS["rows"].items():
        name, _ = key.split("/")
        rest = {label for label in rows if (name, label) not in labels} - {"shift"}
        assert rest == set(SCHEDULES)
    assert FACTS["fails"] == {}
    assert set(WAYS) <= set(FROM_ELSEWHERE)
    unrecorded = {s.name for family in FAMILIES for s in family.METHODS} - set(NAMES)
    assert unrecorded == {"ddim_cfg_pp"}  # A1111's


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize("name", FROM_COMFYUI)
def test_mlx_arrays_stay_mlx_arrays(name: str, noise_model: str):
    states, _ = ours(name, noise_model, "7", mx.array, xp=mx)
    assert all(isinstance(state, mx.array) and state.dtype == mx.float32 for state in states)
    assert distance([np.array(state) for state in states], theirs(name, noise_model, "7")) < 1e-5
