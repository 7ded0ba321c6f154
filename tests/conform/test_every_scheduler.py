"""Every scheduler diffusers exports is fed through the door, or it is said why it cannot be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from .drivers import (
    SD,
    cogvideox_dpm,
    ddim_eta,
    edm,
    helios_dmd,
    in_k_coordinates,
    ipndm,
    karras_ve,
    ltx,
    minimax,
    on_sigmas,
    on_timesteps,
    plms,
    pndm,
    repaint,
    scm,
    unclip,
    upwards,
    wuerstchen,
)
from .foreign import Driven
from .planted import margin

pytestmark = pytest.mark.parity

STEPS = (1, 2, 3, 7, 20, 50)
KARRAS = SD | {"use_karras_sigmas": True}
FLOW_SIGMAS = {"use_flow_sigmas": True, "flow_shift": 3.0}
ABOVE_ZERO = {"final_sigmas_type": "sigma_min"}
OFFSET = SD | {"steps_offset": 1}
LEADING = OFFSET | {"clip_sample": False, "timestep_spacing": "leading"}
SHIFT = {"shift": 3.0}
SDE = {"algorithm_type": "sde-dpmsolver++"}
SKIPPED = {"disable_corrector": [0, 3]}
NO_CHURN = {"s_churn": 0.0, "sigma_max": 5.0}
UNCLIP = {"clip_sample": False, "prediction_type": "sample"}
ONE_STAGE = {"stages": 1, "stage_range": [0, 1], "shift": 3.0}


@dataclass(frozen=True)
class Fed:
    """A scheduler with its settings, and the sampler of ours it should be taken for."""

    scheduler: str
    sampler: str
    drive: Callable[[str, Any, int, str], Driven]
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the sampler
    steps: tuple[int, ...] = STEPS

    def __str__(self) -> str:
        config = "-".join(f"{k}={v}" for k, v in self.config.items() if k not in SD)
        return f"{self.scheduler.removesuffix('Scheduler')}-{self.sampler}-{config}"


UNIPC, DEIS = "UniPCMultistepScheduler", "DEISMultistepScheduler"
MULTISTEP, SINGLESTEP = "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"
EDM = "EDMDPMSolverMultistepScheduler"
FED = [
    Fed("DDIMScheduler", "ddim", on_timesteps, LEADING),
    Fed("DDIMScheduler", "ddim", on_timesteps, LEADING | {"set_alpha_to_one": False}),
    Fed("DDIMScheduler", "ddpm", ddim_eta, LEADING),
    Fed("DDIMParallelScheduler", "ddim", on_timesteps, LEADING),
    Fed("CogVideoXDDIMScheduler", "ddim", on_timesteps, LEADING),
    Fed("RePaintScheduler", "ddim", repaint, SD | {"clip_sample": False}),
    Fed("DDIMInverseScheduler", "ddim_inverse", upwards, LEADING | {"set_alpha_to_one": False}),
    Fed("DDPMScheduler", "ddpm", on_timesteps, LEADING),
    Fed("DDPMParallelScheduler", "ddpm", on_timesteps, LEADING),
    Fed("DDPMWuerstchenScheduler", "ddpm", wuerstchen),
    Fed("UnCLIPScheduler", "ddpm", unclip, UNCLIP, steps=STEPS[1:]),
    Fed("CogVideoXDPMScheduler", "dpmpp_2m_sde", cogvideox_dpm, {"clip_sample": False}),
    Fed("LCMScheduler", "lcm", on_timesteps, SD | {"clip_sample": False}),
    Fed("SCMScheduler", "lcm", scm),
    Fed("TCDScheduler", "tcd", on_timesteps, SD | {"clip_sample": False}, {"below": "timestep"}),
    Fed("PNDMScheduler", "plms", plms, OFFSET | {"skip_prk_steps": True}),
    Fed("PNDMScheduler", "pndm", pndm, OFFSET, {"middle": "timestep"}, (4, 7, 20, 50)),
    Fed("IPNDMScheduler", "ipndm", ipndm),
    Fed("SASolverScheduler", "sa_solver", on_sigmas),
    Fed("SASolverScheduler", "sa_solver", on_sigmas, FLOW_SIGMAS, steps=STEPS[1:]),
    Fed(MULTISTEP, "dpmpp_2m", on_sigmas),
    Fed(MULTISTEP, "dpmsolver_2m", on_sigmas, {"algorithm_type": "dpmsolver", **ABOVE_ZERO}),
    Fed(MULTISTEP, "dpmpp_2m_sde", on_sigmas, SDE),
    Fed("DPMSolverMultistepInverseScheduler", "dpmsolverpp_3m", on_sigmas, {}, {"order": 2}),
    Fed(SINGLESTEP, "dpmsolverpp_2s", on_sigmas),
    Fed(UNIPC, "uni_pc_bh2", on_sigmas),
    Fed(UNIPC, "uni_pc_bh2", on_sigmas, FLOW_SIGMAS),
    Fed(UNIPC, "uni_pc_bh2", on_sigmas, {"solver_order": 1}, {"order": 1}),
    Fed(UNIPC, "uni_pc_bh2", on_sigmas, {"solver_order": 3}, {"order": 3}),
    Fed(UNIPC, "uni_pc", on_sigmas, {"solver_type": "bh1", **ABOVE_ZERO}),
    Fed(UNIPC, "uni_pc", on_sigmas, {"solver_type": "bh1", "predict_x0": False, **ABOVE_ZERO},
        {"kind": "noise"}),
    Fed(UNIPC, "uni_pc_bh2", on_sigmas, SKIPPED, SKIPPED),
    Fed(UNIPC, "uni_pc_bh2", on_sigmas, {"lower_order_final": False, **ABOVE_ZERO},
        {"lower_order_final": False}),
    Fed(DEIS, "deis", on_sigmas),
    Fed(DEIS, "deis", on_sigmas, {"solver_order": 3}, {"order": 3}),
    Fed(DEIS, "deis", on_sigmas, FLOW_SIGMAS, steps=STEPS[1:]),  # one would lead nowhere
    Fed("EDMEulerScheduler", "euler", edm),
    Fed(EDM, "dpmpp_2m", edm),
    Fed(EDM, "dpmsolverpp_3m", edm, {"solver_order": 3}),
    Fed(EDM, "dpmpp_2m_sde", edm, SDE),
    Fed("CosineDPMSolverMultistepScheduler", "dpmpp_2m_sde", edm,
        {"sigma_data": 0.5, "prediction_type": "epsilon"}),
    Fed("KarrasVeScheduler", "heun", karras_ve, NO_CHURN, steps=STEPS[1:]),
    Fed("EulerDiscreteScheduler", "euler", in_k_coordinates, SD),
    Fed("EulerDiscreteScheduler", "euler", in_k_coordinates, KARRAS),
    Fed("EulerAncestralDiscreteScheduler", "euler_ancestral", in_k_coordinates, SD),
    Fed("HeunDiscreteScheduler", "heun", in_k_coordinates, KARRAS),
    Fed("KDPM2DiscreteScheduler", "dpm_2", in_k_coordinates, KARRAS),
    Fed("KDPM2AncestralDiscreteScheduler", "dpm_2_ancestral", in_k_coordinates, KARRAS),
    Fed("LMSDiscreteScheduler", "lms", in_k_coordinates, KARRAS),
    Fed("DPMSolverSDEScheduler", "dpmpp_sde", in_k_coordinates, KARRAS),
    Fed("FlowMatchEulerDiscreteScheduler", "euler", in_k_coordinates, SHIFT),
    Fed("FlowMatchHeunDiscreteScheduler", "heun", in_k_coordinates, SHIFT),
    Fed("FlowMatchLCMScheduler", "lcm", in_k_coordinates, SHIFT),
    Fed("FlowMapEulerDiscreteScheduler", "euler", in_k_coordinates, SHIFT),
    Fed("LTXEulerAncestralRFScheduler", "euler_ancestral", ltx),
    Fed("MiniMaxH3Scheduler", "euler", minimax),
    Fed("HeliosScheduler", "euler", in_k_coordinates, ONE_STAGE | {"scheduler_type": "euler"}),
    # ours leaves out the corrector of the step from σ = 1: at 3 steps 8e-5 of x
    Fed("HeliosScheduler", "uni_pc_bh2", in_k_coordinates, ONE_STAGE, steps=(1, 2, 7, 20, 50)),
    Fed("HeliosDMDScheduler", "lcm", helios_dmd, ONE_STAGE),
]  # fmt: skip
TOKENS = "fills in tokens: there is no latent and no sigma"
NOT_FED = {
    "AmusedScheduler": TOKENS,
    "BlockRefinementScheduler": TOKENS,
    "DiscreteDDIMScheduler": TOKENS,
    "EntropyBoundScheduler": TOKENS,
    "VQDiffusionScheduler": TOKENS,
    "CMStochasticIterativeScheduler": "adds √(σ² − σ_min²) of noise, which no sampler here does",
    "PiflowScheduler": "its network predicts a policy of many velocities, not an image",
    "RFD4ProteinaScheduler": "scales the score by a temperature, for proteins",
    "ScoreSdeVeScheduler": "a corrector whose steps follow the norm of the score",
}


@pytest.mark.parametrize("denoiser", ["gaussian", "mixture"])
@pytest.mark.parametrize("fed", FED, ids=str)
def test_fed(fed: Fed, denoiser: str) -> None:
    for steps in fed.steps:
        run = fed.drive(fed.scheduler, fed.config, steps, denoiser)
        verdict = run.verdict(fed.sampler, denoiser, fed.options)
        assert verdict.verdict == "conforms", f"{steps} steps: {verdict.sentence}"
        assert margin(verdict) < 0.9


def test_every_scheduler_is_accounted_for() -> None:
    diffusers = pytest.importorskip("diffusers")
    exported = {name for name in dir(diffusers) if name.endswith("Scheduler")}
    fed = {each.scheduler for each in FED}
    assert not fed & set(NOT_FED)
    assert exported == fed | set(NOT_FED)
