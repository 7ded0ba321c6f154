"""diffusers' own samplers are never called wrong: on a network, and on an image predictor."""

from typing import Any

import msgspec
import numpy as np
import pytest

from lydite.conform.answers import Candidate
from lydite.conform.judge import judge
from lydite.conform.make_problem import DENOISERS, ProblemSpec, make_problem
from lydite.conform.problem import Problem
from lydite.conform.replay import predict
from lydite.sampling.sampler_types import FLOW, VE
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.table import ContinuousSigmas, alphas_cumprod, betas, noise_table
from support.schedulers import ABOVE_ZERO, DRAWN, FLOW_SIGMAS, MULTISTEP, SD, SHAPE, Scheduler, size

from .planted import margin, written

pytestmark = pytest.mark.parity

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
LEVELS = alphas_cumprod(betas("scaled_linear", 0.00085, 0.012), float32=True)  # as it rounds them
K_STYLE = {
    "euler": "EulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "dpm_2": "KDPM2DiscreteScheduler",
    "lms": "LMSDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
}
TWICE = ("heun", "dpm_2")  # calls a step, but for the last
quiet = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # theirs
PREDICTIONS = {"eps": "epsilon", "v": "v_prediction"}


@quiet
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", K_STYLE)
def test_diffusers_in_its_own_coordinates(
    name: str, prediction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, schedulers = pytest.importorskip("torch"), pytest.importorskip("diffusers.schedulers")
    ancestral = name == "euler_ancestral"
    spacing = {"timestep_spacing": "linspace"} if ancestral else {"use_karras_sigmas": True}
    scheduler = getattr(schedulers, K_STYLE[name])(
        **BETAS, **spacing, prediction_type=PREDICTIONS[prediction]
    )
    schedule = "linspace" if ancestral else "karras"
    for steps in (2, 7, 20):
        asked = ProblemSpec(name, schedule, steps, prediction=prediction, guidance=3.0)
        problem = make_problem(asked, noise_table(LEVELS))
        if name == "dpm_2":  # KDPM2 rounds the timesteps of its grid, and none between them
            whole = tuple(float(round(timestep)) for timestep in problem.timesteps)
            problem = msgspec.structs.replace(problem, timesteps=whole)
        noise = iter(problem.normals)

        def draw(shape: Any, noise: Any = noise, **_: Any) -> Any:
            values = next(noise, [0.0] * 24)  # the last step scales its noise by 0
            return torch.tensor(values, dtype=torch.float32).reshape(shape)

        module = f"{type(scheduler).__module__}.randn_tensor"
        monkeypatch.setattr(module, draw, raising=False)
        scheduler.set_timesteps(steps)
        x = torch.tensor(problem.x, dtype=torch.float32).reshape(problem.shape)
        xs = []
        for index, t in enumerate(scheduler.timesteps):
            model_input = scheduler.scale_model_input(x, t)
            predicted = guided(problem, model_input.numpy(), float(t))
            x = scheduler.step(torch.from_numpy(predicted), t, x).prev_sample
            half = name in TWICE and index % 2 == 0 and index + 1 < len(scheduler.timesteps)
            if not half:
                xs.append(x.numpy())
        verdict = judge(problem, written(xs))
        assert verdict.verdict == "conforms", verdict.sentence
        assert margin(verdict) < 0.5


@quiet
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_dpm_solver_of_diffusers_on_a_network(prediction: str) -> None:
    torch, schedulers = pytest.importorskip("torch"), pytest.importorskip("diffusers.schedulers")
    scheduler = schedulers.DPMSolverMultistepScheduler(
        **BETAS, use_karras_sigmas=True, prediction_type=PREDICTIONS[prediction]
    )
    for steps in (2, 7, 20):
        asked = ProblemSpec("dpmpp_2m", "karras", steps, prediction=prediction, guidance=3.0)
        problem = make_problem(asked, noise_table(LEVELS, rule="round"))
        scheduler.set_timesteps(steps)
        scale = np.sqrt(1 + scheduler.sigmas.double().numpy() ** 2)
        start = np.array(problem.x).reshape(problem.shape) / scale[0]
        z = torch.tensor(start, dtype=torch.float32)
        xs = []
        for index, t in enumerate(scheduler.timesteps):
            predicted = guided(problem, z.numpy(), float(t))
            z = scheduler.step(torch.from_numpy(predicted), t, z).prev_sample
            xs.append(z.double().numpy() * scale[index + 1])
        verdict = judge(problem, written(xs))
        assert verdict.verdict == "conforms", verdict.sentence
        assert margin(verdict) < 0.5


@pytest.mark.parametrize("name, kind", [
    ("euler", "FlowMatchEulerDiscreteScheduler"), ("heun", "FlowMatchHeunDiscreteScheduler")
])  # fmt: skip
def test_diffusers_flow(name: str, kind: str) -> None:
    torch, schedulers = pytest.importorskip("torch"), pytest.importorskip("diffusers.schedulers")
    scheduler = getattr(schedulers, kind)(shift=3.0)
    for steps in (2, 7, 20):
        asked = ProblemSpec(name, "sd3_diffusers", steps, model="sd3", guidance=3.0)
        problem = make_problem(asked, FlowSigmas(3.0))
        scheduler.set_timesteps(steps)
        x = torch.tensor(problem.x, dtype=torch.float32).reshape(problem.shape)
        xs = []
        for index, t in enumerate(scheduler.timesteps):
            predicted = guided(problem, x.numpy(), float(t))
            x = scheduler.step(torch.from_numpy(predicted), t, x).prev_sample
            if name == "euler" or index % 2 or index + 1 == len(scheduler.timesteps):
                xs.append(x.numpy())
        verdict = judge(problem, written(xs))
        assert verdict.verdict == "conforms", verdict.sentence
        assert margin(verdict) < 0.5


@pytest.mark.parametrize("name, kind", [
    ("euler", "EDMEulerScheduler"), ("dpmpp_2m", "EDMDPMSolverMultistepScheduler")
])  # fmt: skip
def test_diffusers_edm_on_a_network(name: str, kind: str) -> None:
    torch, schedulers = pytest.importorskip("torch"), pytest.importorskip("diffusers.schedulers")
    scheduler = getattr(schedulers, kind)(sigma_data=0.5)
    for steps in (2, 7, 20):
        problem = make_problem(ProblemSpec(name, "karras", steps, model="edm", guidance=3.0))
        assert problem.prediction == "edm" and problem.sigma_data == 0.5
        scheduler.set_timesteps(steps)
        x = torch.tensor(problem.x, dtype=torch.float32).reshape(problem.shape)
        xs, told = [], []
        for t in scheduler.timesteps:
            predicted = guided(problem, scheduler.scale_model_input(x, t).numpy(), float(t))
            x = scheduler.step(torch.from_numpy(predicted), t, x).prev_sample
            xs.append(x.numpy())
            told.append(float(t))
        candidate = written(xs)
        candidate.values.update({("timestep", i, 0): np.array(t) for i, t in enumerate(told)})
        verdict = judge(problem, candidate)
        assert verdict.verdict == "conforms", verdict.sentence
        assert margin(verdict) < 0.5


def guided(problem: Problem, model_input: np.ndarray, timestep: float) -> np.ndarray:
    assert problem.guidance is not None
    cond = predict(problem, problem.denoiser, model_input, timestep)
    uncond = predict(problem, problem.guidance.uncond, model_input, timestep)
    return (uncond + (cond - uncond) * problem.guidance.scale).astype(np.float32)


SINGLESTEP, DEIS = "DPMSolverSinglestepScheduler", "DEISMultistepScheduler"
UNIPC = "UniPCMultistepScheduler"
ON_NOISE = {"algorithm_type": "dpmsolver", **ABOVE_ZERO}
ON_NOISE_SDE = {"algorithm_type": "sde-dpmsolver", **ABOVE_ZERO}
SDE = {"algorithm_type": "sde-dpmsolver++"}
IMAGES: list[tuple[str, dict[str, Any], str]] = [
    (MULTISTEP, {}, "dpmpp_2m"),
    (MULTISTEP, FLOW_SIGMAS, "dpmpp_2m"),
    (MULTISTEP, {"solver_type": "heun"}, "res_multistep"),
    (MULTISTEP, {"solver_order": 3}, "dpmsolverpp_3m"),
    (MULTISTEP, ON_NOISE, "dpmsolver_2m"),
    (MULTISTEP, ON_NOISE | {"solver_order": 3}, "dpmsolver_3m"),
    (SINGLESTEP, {}, "dpmsolverpp_2s"),
    (SINGLESTEP, {"solver_order": 3}, "dpmsolverpp_3s"),
    (SINGLESTEP, ON_NOISE, "dpmsolver_2s"),
    (SINGLESTEP, ON_NOISE | {"solver_order": 3}, "dpmsolver_3s"),
    (UNIPC, {"solver_type": "bh1", **ABOVE_ZERO}, "uni_pc"),
    (UNIPC, {}, "uni_pc_bh2"),
    (DEIS, {}, "deis"),
    (MULTISTEP, ON_NOISE_SDE | {"solver_order": 1}, "sde_dpmsolver_1m"),
    (MULTISTEP, ON_NOISE_SDE, "sde_dpmsolver_2m"),
    (MULTISTEP, SDE | {"solver_order": 1}, "ddpm"),
    (MULTISTEP, SDE, "dpmpp_2m_sde"),
    (MULTISTEP, SDE | {"solver_type": "heun"}, "dpmpp_2m_sde_heun"),
    (MULTISTEP, SDE | FLOW_SIGMAS, "dpmpp_2m_sde"),
]


@quiet
@pytest.mark.parametrize("denoiser", ["gaussian", "mixture"])
@pytest.mark.parametrize(("kind", "config", "sampler"), IMAGES, ids=str)
def test_diffusers_on_images(
    kind: str, config: dict[str, Any], sampler: str, denoiser: str
) -> None:
    torch = pytest.importorskip("torch")
    noise_model = FLOW if "use_flow_sigmas" in config else VE
    denoise = DENOISERS[denoiser].under(noise_model)
    for steps in (2, 3, 7, 20, 50):
        settings = SD | {"prediction_type": "sample"} | config
        scheduler = Scheduler(kind, steps, "float32", settings)
        sigmas = scheduler.sigmas
        scale = [size(noise_model, sigma) for sigma in sigmas]
        z, xs = torch.from_numpy(DRAWN[-1]).to(torch.float32), []
        for index, sigma in enumerate(sigmas[:-1]):
            image = denoise(z.double().numpy() * scale[index], sigma)
            z = scheduler.step(torch.from_numpy(image).to(torch.float32), index, z)
            xs.append(z.double().numpy() * scale[index + 1])
        start = DRAWN[-1] * scale[0]
        problem = Problem(
            sampler,
            noise_model.name,
            "denoised",
            tuple(sigmas),
            (0.0,) * len(xs),
            SHAPE,
            tuple((start / sigmas[0]).ravel().tolist()),
            tuple(start.ravel().tolist()),
            DENOISERS[denoiser],
            normals=tuple(tuple(each.ravel().tolist()) for each in DRAWN[: len(xs)]),
        )
        verdict = judge(problem, written(xs))
        assert verdict.verdict == "conforms", verdict.sentence
        assert margin(verdict) < 0.5


TABLES: list[tuple[str, dict[str, Any], str]] = [
    ("EulerDiscreteScheduler", {"use_karras_sigmas": True}, "karras"),
    ("EulerDiscreteScheduler", {"use_exponential_sigmas": True}, "exponential"),
    ("EulerDiscreteScheduler", {"use_beta_sigmas": True}, "beta_sigmas"),
    ("EulerDiscreteScheduler", {"timestep_spacing": "linspace"}, "linspace"),
    ("EulerDiscreteScheduler", {"timestep_spacing": "leading", "steps_offset": 1}, "leading"),
    ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}, "trailing"),
    ("DPMSolverMultistepScheduler", {"timestep_spacing": "linspace"}, "linspace_dpm"),
    (
        "DPMSolverMultistepScheduler",
        {"timestep_spacing": "leading", "steps_offset": 1},
        "leading_dpm",
    ),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, "sd3_diffusers"),
    ("EDMEulerScheduler", {}, "karras"),
]


@quiet
@pytest.mark.parametrize(("kind", "config", "schedule"), TABLES, ids=str)
def test_tables_of_diffusers(kind: str, config: dict[str, Any], schedule: str) -> None:
    schedulers = pytest.importorskip("diffusers.schedulers")
    flow, edm = "FlowMatch" in kind, "EDM" in kind
    scheduler = getattr(schedulers, kind)(**({} if flow or edm else BETAS), **config)
    model = FlowSigmas(3.0) if flow else ContinuousSigmas() if edm else noise_table(LEVELS)
    for steps in (2, 7, 20, 50):
        problem = make_problem(ProblemSpec(None, schedule, steps), model)
        scheduler.set_timesteps(steps)
        tables = {
            "sigmas": scheduler.sigmas.double().numpy(),
            "timesteps": scheduler.timesteps.double().numpy(),
        }
        verdict = judge(problem, Candidate({}, tables, "f32", complete=True))
        assert verdict.verdict == "conforms", verdict.sentence
