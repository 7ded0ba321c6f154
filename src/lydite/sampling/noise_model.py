"""How much of a latent is image and how much is noise: x = α(σ)·image + σ·noise.

Samplers are written once, against a noise model. On the ODE dx/dσ = (x − D)/σ both models agree;
they differ where the half log-SNR λ = ln(α/σ) enters. VP latents are VE ones divided by √(1 + σ²).
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NoiseModel:
    """`ve`: α = 1, σ without end (SD 1.5, SDXL, EDM). `flow`: α = 1 − σ, σ up to 1 (SD3, FLUX)."""

    name: Literal["ve", "flow"]

    def alpha(self, sigma: float) -> float:
        return 1.0 if self.name == "ve" else 1.0 - sigma

    def half_log_snr(self, sigma: float) -> float:
        """λ: ∞ where there is no noise, −∞ where there is nothing else."""
        if sigma == 0:
            return math.inf
        alpha = self.alpha(sigma)
        return -math.inf if alpha == 0 else math.log(alpha / sigma)

    def sigma_at(self, half_log_snr: float) -> float:
        """The sigma of a λ."""
        if self.name == "ve":
            return math.exp(-half_log_snr)
        if half_log_snr > 0:  # two forms of one sigmoid, so that neither overflows
            ratio = math.exp(-half_log_snr)
            return ratio / (1 + ratio)
        return 1 / (1 + math.exp(half_log_snr))


VE, FLOW = NoiseModel("ve"), NoiseModel("flow")
