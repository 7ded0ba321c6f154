"""Small calibration sets drawn with a random model, and observers that keep all they see."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.model_session import Model, ModelSession, model_hash, open_pipeline
from lydite.calibrate.request_record import conditions_of
from lydite.calibrate.settings import Description, Settings, plan_of
from lydite.calibrate.store.writer import Writer
from lydite.core.request import Request
from lydite.pipelines.pipeline import Pipeline
from lydite.trace.arrays import to_numpy
from untrained_sd3 import TRANSFORMER, make_untrained

STEPS = 3
PROMPTS = ("a red star", "a blue ring", "a red star")
REQUEST = Request("", steps=STEPS, guidance=3.0, text_length=8, width=64, height=64)


def make_small(folder: Path, *, seed: int = 0) -> Path:
    """A random model with both kinds of attention, smaller than the demo's."""
    sizes = {"num_layers": 2, "attention_head_dim": 16, "caption_projection_dim": 64}
    transformer = replace(TRANSFORMER, **sizes, dual_attention_layers=(0,))
    return make_untrained(folder, transformer=transformer, seed=seed)


def loaded(model: Path) -> Pipeline:
    """A pipeline with its networks in memory."""
    pipeline = open_pipeline(Model(str(model)), "float32")
    pipeline.model.prepare()
    return pipeline


def draw_set(
    folder: Path,
    pipeline: Pipeline,
    *,
    images: int = len(PROMPTS),
    request: Request = REQUEST,
) -> Path:
    """A complete set of a few images, every step kept."""
    request = pipeline.plan(request).request
    conditions = conditions_of(request, "float32")
    name = str(pipeline.model.path)
    settings = Settings(model_hash(pipeline), conditions, "F32", model=name)
    drawn = [(prompt, seed) for seed, prompt in enumerate(PROMPTS[:images])]
    plan = plan_of(drawn, range(STEPS), pictures=False)
    session = ModelSession(Description(settings, plan), pipeline)
    with Writer.start(folder, settings, plan) as writer:
        for image, wanted in writer.missing().items():
            writer.commit(session.items(image, wanted))
    return folder


class Everything:
    """Wants what another observer wants, and keeps every value of it."""

    def __init__(self, wants: Any) -> None:
        self.wants = wants
        self.values: dict[tuple[str, str], list[NDArray[Any]]] = {}

    def add(self, path: str, slot: str, value: Any) -> None:
        self.values.setdefault((path, slot), []).append(np.array(to_numpy(value)))
