"""What tests over all samplers share: a denoiser for CFG++, and how to run them by their papers."""

from dataclasses import dataclass
from typing import Any

from lydite.sampling.analytic import Gaussian

AS_THE_PAPER = {  # where ComfyUI's own choice, our default, is not the method
    "res_multistep_ancestral": {"written_for": "model"},
    "res_multistep_ancestral_cfg_pp": {"written_for": "model"},
    "dpmpp_2s_ancestral_cfg_pp": {"written_for": "model", "uncond_of": "start"},
}


@dataclass(frozen=True)
class Paired(Gaussian):
    """A denoiser that sees the same with and without a prompt."""

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        return self(x, sigma), self(x, sigma)
