"""Sigmas and timesteps of the flow families for many sizes, against diffusers' own functions."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from lydite.pipelines.family import Family, families
from lydite.sampling.scheduler_config import read_scheduler_config
from support import tiny_flux2, tiny_qwen_image

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

SIZES = [(512, 512), (1024, 1024), (832, 1216), (1664, 928), (256, 2048)]
STEPS = [2, 4, 28, 50]  # diffusers divides 0 by 0 in one step with a terminal
DYNAMIC = {"shift": 3.0, "use_dynamic_shifting": True, "max_shift": 1.15}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "FLUX.1-dev": ("flux", DYNAMIC),
    "FLUX.1-schnell": ("flux", {"shift": 1.0}),
    "FLUX.2-klein": ("flux2", tiny_flux2.SCHEDULER),
    "Qwen-Image": ("qwen_image", tiny_qwen_image.SCHEDULER),
}


def family_of(name: str) -> Family:
    return next(family for family in families() if family.name == name)


@pytest.mark.parametrize("name", CONFIGS)
def test_schedules_of_twenty_sizes_and_step_counts(name: str) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    family_name, config = CONFIGS[name]
    family = family_of(family_name)

    class Exact(FlowMatchEulerDiscreteScheduler):
        def time_shift(self, mu: float, sigma: float, t: Any) -> Any:
            exact: Any = np.asarray(t, np.float64)
            return super().time_shift(mu, sigma, exact)

    raw = {"_class_name": "FlowMatchEulerDiscreteScheduler", **config}
    port = read_scheduler_config(raw, where=name, grid=family.flow_grid, mu=family.mu)
    for (width, height), steps in product(SIZES, STEPS):
        tokens = (width // 16) * (height // 16)
        schedule = port.make_schedule(steps, tokens)
        for scheduler_class, limit in ((Exact, 1e-7), (FlowMatchEulerDiscreteScheduler, 4e-7)):
            scheduler: Any = scheduler_class(**config)
            if family_name == "flux2":
                mu = compute_empirical_mu(tokens, steps)
            else:
                mu = calculate_shift(
                    tokens,
                    scheduler.config["base_image_seq_len"],
                    scheduler.config["max_image_seq_len"],
                    scheduler.config["base_shift"],
                    scheduler.config["max_shift"],
                )
            sigmas: Any = np.linspace(1.0, 1 / steps, steps)
            retrieve_timesteps(scheduler, steps, "cpu", sigmas=sigmas, mu=mu)
            expected = scheduler.sigmas.double().numpy()
            assert np.abs(schedule.sigmas - expected).max() <= limit, (width, height, steps)
            times = np.abs(schedule.timesteps - scheduler.timesteps.double().numpy())
            assert times.max() <= 1000 * limit, (width, height, steps)
