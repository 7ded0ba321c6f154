"""The embedded model in diffusers: loads without help, and draws the same pictures as ours."""

from typing import Any

import numpy as np
import pytest

from lydite import embedded
from lydite.core.request import Request
from lydite.pipelines.pipeline import Pipeline

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity


def test_diffusers_draws_the_same_pictures() -> None:
    from diffusers import StableDiffusion3Pipeline

    reference: Any = StableDiffusion3Pipeline.from_pretrained(embedded.MODEL)
    reference.set_progress_bar_config(disable=True)
    ours = Pipeline.open(embedded.NAME)
    for seed, prompt in enumerate(("a large red star above a small blue ring", "moon")):
        request = Request(prompt, steps=8, guidance=3.0, text_length=16)
        picture = next(ours.generate(request, [seed]))
        image = reference(
            prompt,
            num_inference_steps=8,
            guidance_scale=3.0,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images[0]
        off = np.abs(picture.pixels.astype(int) - (image * 255).round().astype(int))
        assert image.std() > 0.05 and off.max() <= 1
