"""Orders of convergence that options change, and the weights of multistep solvers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.sampling.analytic import Gaussian, Mixture
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE
from lydite.sampling.samplers.algebra import adams_weights, exponential_weights
from lydite.sampling.samplers.deis import VP_ENDS, vp_time
from lydite.sampling.samplers.dpm_solver import sample_dpm_multistep, sample_dpm_singlestep
from lydite.sampling.samplers.pndm import _newton_weights

NOISE_MODELS = {"ve": VE, "flow": FLOW}
ENDS = {"ve": (3.0, 0.2), "flow": (0.9, 0.1)}
START = np.array([2.0])
NO_CORRECTOR = {"disable_corrector": range(999)}
GOLDEN = Path(__file__).parent / "golden"


def measured(sampler: Any, noise_model: str, options: dict[str, Any]) -> float:
    """The order over steps that grow from the start on, and neither start nor end at an end."""
    sample = SAMPLERS[sampler].function if isinstance(sampler, str) else sampler
    first, last = ENDS[noise_model]
    errors = []
    for steps in (240, 480):  # multiples of 2 and 3
        sigmas = (first + (last - first) * np.linspace(0, 1, steps + 1) ** 2).tolist()
        error = 0.0
        for spread in (0.3, 0.6, 1.2):
            data = Gaussian(spread=spread, noise_model=NOISE_MODELS[noise_model])
            *_, step = sample(data, START, sigmas, **options)
            error += float(np.abs(step.x - data.follow(START, first, last)).max())
        errors.append(error)
    return math.log2(errors[0] / errors[1])


ODE = {"tau": lambda *_: 0.0, "noise": None}
HIGH = {"predictor_order": 3, "corrector_order": 4, "taper": None}
OF_ORDER: tuple[tuple[Any, dict[str, Any], float], ...] = (
    (sample_dpm_multistep, {"order": 3, "curvature": 1.0}, 3),
    (sample_dpm_multistep, {"order": 3, "curvature": 0.5}, 2),
    (sample_dpm_singlestep, {"order": 3, "solver": "heun"}, 3),
    ("deis", {"order": 3}, 3),
    ("uni_pc", {"order": 3, "lower_order_final": False}, 4),
    ("uni_pc", {"order": 3, "lower_order_final": False, **NO_CORRECTOR}, 3),
    ("uni_pc_bh2", {"order": 2, "lower_order_final": False}, 3),
    ("sa_solver", ODE, 2),
    ("sa_solver_pece", ODE | HIGH, 4),
    ("ipndm_v", {"exact": True}, 4),
)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize("case", range(len(OF_ORDER)))
def test_options_change_the_order(case: int, noise_model: str):
    sampler, options, order = OF_ORDER[case]
    assert measured(sampler, noise_model, options) == pytest.approx(order, abs=0.2)


def test_pndm_starts_with_steps_of_order_four():
    data, errors = Gaussian(), []
    for width in (0.04, 0.02):
        sigmas = [2.0 - width * step for step in range(4)]
        *_, step = SAMPLERS["pndm"].run(data, START, sigmas)
        errors.append(np.abs(step.x - data.follow(START, 2.0, sigmas[-1])).max())
    # three steps and not a whole way: one more than the order
    assert math.log2(errors[0] / errors[1]) == pytest.approx(5, abs=0.3)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_deis_tab_is_the_deis_of_comfyui(noise_model: str):
    facts = json.loads((GOLDEN / "comfyui.json").read_text())
    theirs = np.load(GOLDEN / "comfyui.npz")
    data = Mixture(**facts["denoiser"]["cond"], noise_model=NOISE_MODELS[noise_model])
    for label, (_, stop) in facts["rows"][f"deis/{noise_model}"].items():
        sigmas = theirs[f"sigmas/{noise_model}/{label}"].tolist()
        start = theirs["start"].astype(np.float64) * sigmas[0]
        *_, step = SAMPLERS["deis_tab"].run(data, start, sigmas)
        # it sums over rectangles; with ten times as many it comes ten times closer
        np.testing.assert_allclose(
            step.x, theirs[f"deis/{noise_model}"][stop - 1], rtol=0, atol=5e-5
        )


def test_the_time_of_deis_tab_is_that_of_its_diffusion():
    least, most, start = VP_ENDS
    np.testing.assert_allclose(vp_time(np.array([least, most])), [start, 1], rtol=1e-9)


@pytest.mark.parametrize("rate", (-1.0, 0.0, 1.0, 2.0))
@pytest.mark.parametrize("h", (1e-3, 0.2, 0.9, 1.1, 6.0))
def test_weights_are_the_integrals_of_lagrange_polynomials(h: float, rate: float):
    nodes = [-h, -h - 0.7, -h - 1.0, -h - 2.5]
    points, shares = np.polynomial.legendre.leggauss(60)
    v = (points - 1) * h / 2
    for own, weight in zip(nodes, exponential_weights(nodes, h, rate), strict=True):
        others = [node for node in nodes if node != own]
        values = np.prod([(v - other) / (own - other) for other in others], axis=0)
        expected = h / 2 * (shares @ (np.exp(rate * v) * values))
        assert weight == pytest.approx(expected, rel=1e-9, abs=1e-12 * h)
    assert exponential_weights(nodes, 0.0, rate) == [0.0] * 4


def test_the_weights_of_ipndm_v_are_not_adams_and_bashforths():
    """diff-sampler's: right in order 2, on even steps in order 3, and nowhere in order 4."""
    even, uneven = [3.0, 4.0, 5.0, 6.0], [3.0, 3.5, 5.0, 5.2]
    exact = [-55 / 24, 59 / 24, -37 / 24, 9 / 24]
    assert adams_weights(even, 2.0) == pytest.approx(exact, rel=1e-12)
    assert _newton_weights(even, 2.0) == pytest.approx([-57 / 24, 65 / 24, -43 / 24, 11 / 24])
    for nodes, agree in ((even, (1, 2, 3)), (uneven, (1, 2))):
        for order in (1, 2, 3, 4):
            ours, due = _newton_weights(nodes[:order], 2.0), adams_weights(nodes[:order], 2.0)
            assert (ours == pytest.approx(due, rel=1e-12)) == (order in agree)
    assert sum(_newton_weights(uneven, 2.0)) != pytest.approx(-1.0, rel=1e-3)  # the step's width
