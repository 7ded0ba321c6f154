"""The model that gets the bugs: nothing at a default, and the same picture as in diffusers."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lydite.pipelines.pipeline import Pipeline
from seeded_bugs.tiny_model import REQUEST, SEED


def test_no_parameter_is_left_where_it_would_hide_a_bug(pipeline: Pipeline) -> None:
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        for path, value in tree_flatten(pipeline.model.network(name).parameters()):
            assert isinstance(value, mx.array)
            assert np.array(value).std() > 5e-3, f"{name} {path}"


@pytest.mark.parity
def test_diffusers_draws_the_same_picture(pipeline: Pipeline, model) -> None:
    torch = pytest.importorskip("torch")
    from diffusers import StableDiffusion3Pipeline

    theirs: Any = StableDiffusion3Pipeline.from_pretrained(model)
    theirs.set_progress_bar_config(disable=True)
    image = theirs(
        REQUEST.prompt,
        negative_prompt=REQUEST.negative,
        num_inference_steps=REQUEST.steps,
        guidance_scale=REQUEST.guidance,
        max_sequence_length=REQUEST.text_length,
        width=REQUEST.width,
        height=REQUEST.height,
        generator=torch.Generator().manual_seed(SEED),
        output_type="np",
    ).images[0]
    ours = next(pipeline.generate(REQUEST, [SEED])).pixels
    assert image.std() > 0.05
    assert np.abs(ours.astype(int) - (image * 255).round()).max() <= 1
