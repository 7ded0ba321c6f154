"""Mistakes between the sampler and the network: c_in, the denoised, the sign, guidance."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.replay import NetworkCall, Plan, c_in
from lydite.sampling.denoiser import find_prediction


def adds_denoised(plan: Plan) -> Plan:
    """(x − D′)/σ is the denoised itself when D′ = x − σ·D."""
    return replace(plan, to_sampler=lambda x, denoised, sigma: x - denoised * sigma)


def no_c_in(plan: Plan) -> Plan | None:
    return replace(plan, model_input=lambda x, sigma: x) if _scales(plan) else None


def inverted_c_in(plan: Plan) -> Plan | None:
    if not _scales(plan):
        return None
    return replace(plan, model_input=lambda x, sigma: x / c_in(plan.problem, sigma))


def c_in_on_a_flow(plan: Plan) -> Plan | None:
    if plan.problem.prediction != "flow":
        return None
    return replace(plan, model_input=lambda x, sigma: x / math.sqrt(sigma**2 + 1))


def scaled_latent(plan: Plan) -> Plan | None:
    """The denoised from the network's input instead of from x."""
    right = plan.denoised
    if not _scales(plan) or plan.problem.prediction == "x0":
        return None
    return replace(plan, denoised=lambda call: right(replace(call, x=call.model_input)))


def scaled_state(plan: Plan) -> Plan | None:
    """The scaled latent goes on as x: c_in was applied in place."""
    if not _scales(plan):
        return None

    def method(denoise: Any, x: Any, sigmas: Any, noise: Any) -> Any:
        for at in range(len(sigmas) - 1):
            scaled = x * c_in(plan.problem, sigmas[at])
            for step in plan.method(denoise, scaled, sigmas[at : at + 2], noise):
                x = step.x
                yield step

    return replace(plan, method=method, model_input=lambda x, sigma: x)


def flipped_sign(plan: Plan) -> Plan | None:
    right = plan.denoised
    if plan.problem.prediction == "denoised":
        return None
    return replace(plan, denoised=lambda call: right(replace(call, prediction=-call.prediction)))


def prediction_as_denoised(plan: Plan) -> Plan | None:
    if plan.problem.prediction in ("denoised", "x0"):
        return None
    return replace(plan, denoised=lambda call: call.prediction)


def denoised_without_sigma(plan: Plan) -> Plan | None:
    if plan.problem.prediction not in ("eps", "flow"):
        return None
    return replace(plan, denoised=lambda call: call.x - call.prediction)


def taken_for(right: str, kind: str) -> Callable[[Plan], Plan | None]:
    """One prediction type read as another."""

    def apply(plan: Plan) -> Plan | None:
        if plan.problem.prediction != right:
            return None

        def denoised(call: NetworkCall) -> Any:
            return find_prediction(kind).denoised(call.x, call.prediction, call.sigma)

        return replace(plan, denoised=denoised)

    return apply


def guided_by(weight: Callable[[float], float]) -> Callable[[Plan], Plan | None]:
    """Guidance with another weight of cond; that of uncond is the rest to 1."""

    def apply(plan: Plan) -> Plan | None:
        if plan.problem.guidance is None:
            return None
        w = weight(plan.problem.guidance.scale)
        return replace(plan, guided=lambda cond, uncond: uncond + (cond - uncond) * w)

    return apply


def _scales(plan: Plan) -> bool:
    return plan.problem.prediction not in ("flow", "denoised")


FIX_GUIDANCE = "guided = uncond + scale · (cond − uncond); scale 1 is cond alone."
FIX_C_IN = "Multiply the network's input, and nothing else, by c_in: 1/√(σ² + 1) for eps, v and x0."

WIRING = (
    Mistake(
        "denoised-as-derivative",
        "adds the denoised where the derivative belongs: x + D·Δσ",
        "The derivative is (x − D)/σ, so an Euler step is x + (x − D)/σ · (σ_next − σ).",
        adds_denoised,
    ),
    Mistake("no-c-in", "gives the network x without c_in", FIX_C_IN, no_c_in),
    Mistake(
        "scaled-latent-in-denoised",
        "computes the denoised from the scaled latent c_in·x instead of from x",
        "D = x − σ·F with x as it was before c_in; the scaled latent is for the network alone.",
        scaled_latent,
    ),
    Mistake(
        "c-in-in-place",
        "goes on from the scaled latent: c_in was applied to x itself",
        "Keep x; scale a copy for the network.",
        scaled_state,
    ),
    Mistake("c-in-inverted", "divides x by c_in instead of multiplying", FIX_C_IN, inverted_c_in),
    Mistake(
        "c-in-on-flow",
        "scales the input of a flow model by 1/√(σ² + 1)",
        "A flow model takes x as it is: c_in is 1.",
        c_in_on_a_flow,
    ),
    Mistake(
        "sign-flipped",
        "has the sign of the prediction flipped: x + σ·F",
        "D = x − σ·F: eps is noise, and a velocity is noise − image here. Negate it if yours is "
        "image − noise.",
        flipped_sign,
    ),
    Mistake(
        "prediction-as-denoised",
        "takes the prediction for the denoised image",
        "D = x − σ·F for eps and flow, x/(σ² + 1) − F·σ/√(σ² + 1) for v.",
        prediction_as_denoised,
    ),
    Mistake(
        "denoised-without-sigma",
        "subtracts the prediction without its sigma: x − F",
        "D = x − σ·F.",
        denoised_without_sigma,
    ),
    Mistake(
        "v-taken-for-eps",
        "reads a v-prediction as eps",
        "D = x/(σ² + 1) − F·σ/√(σ² + 1) for v.",
        taken_for("v", "eps"),
    ),
    Mistake(
        "eps-taken-for-v",
        "reads an eps-prediction as v",
        "D = x − σ·F for eps and flow.",
        taken_for("eps", "v"),
    ),
    Mistake(
        "x0-taken-for-v",
        "reads an x0-prediction as v",
        "D = F for x0: the prediction is the image.",
        taken_for("x0", "v"),
    ),
    Mistake(
        "cond-uncond-swapped",
        "has cond and uncond swapped",
        FIX_GUIDANCE + " Check the order in which the batch is split.",
        guided_by(lambda scale: 1 - scale),
    ),
    Mistake(
        "guidance-one-more",
        "guides with scale + 1: cond + scale·(cond − uncond)",
        FIX_GUIDANCE,
        guided_by(lambda scale: scale + 1),
    ),
    Mistake(
        "guidance-one-less",
        "guides with scale − 1",
        FIX_GUIDANCE,
        guided_by(lambda scale: scale - 1),
    ),
    Mistake(
        "guidance-ignored",
        "takes cond alone and never guides",
        FIX_GUIDANCE,
        guided_by(lambda scale: 1.0),
    ),
    Mistake("uncond-alone", "takes uncond alone", FIX_GUIDANCE, guided_by(lambda scale: 0.0)),
)
