"""The inputs and outputs of every module of one component, recorded in memory."""

from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import numpy as np

from lydite.models import mmdit, modulation
from lydite.models.text import clip, t5
from lydite.models.vae.kl import AutoencoderKL
from lydite.pipelines import planning, steps
from lydite.pipelines.family import Run
from lydite.pipelines.noise import NOISES
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.recording import FamilyRecorder, TraceObserver, draw_recorded
from lydite.sampling.denoiser import Prediction
from lydite.tokenizers.tokenizer import Tokenizer
from lydite.trace.events import Event, EventId, Header
from lydite.trace.mlx_capture import record_modules, walk
from lydite.trace.writer import Capture
from seeded_bugs.recording import encode_picture
from seeded_bugs.tiny_model import REQUEST, SEED

Values = dict[EventId, Any]
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
SHORT = REQUEST.replace(steps=2)


class MemoryWriter:
    """Stores the arrays of a recorder in memory instead of in files."""

    header, capture = Header(framework="mlx"), Capture()

    def __init__(self) -> None:
        self.values: Values = {}

    def add(self, name: str, value: Any, *, slot: str, step: int, **_: Any) -> Event:
        call = sum(event_id[:3] == (name, slot, step) for event_id in self.values)
        self.values[name, slot, step, call] = np.array(value).astype(np.float64)
        return Event(0, name, (), "f32", slot, step=step, call=call)


def observe(pipeline: Pipeline, part: str) -> Values:
    """Values of one component, of the VAE's encoder, or of drawing a picture in two steps."""
    writer: Any = MemoryWriter()
    recorder, run = FamilyRecorder(writer, pipeline.family), pipeline.plan(SHORT)
    if part == "pipeline":
        draw_recorded(pipeline, run, SEED, recorder)
    elif part in ENCODERS:
        with ExitStack() as stack:
            for name in ENCODERS:
                network = pipeline.model.network(name)
                stack.enter_context(record_modules(recorder, network, scope=name))
            pipeline.encode(run)
    elif part == "encode":
        encode_picture(pipeline, recorder)
    elif part == "vae":
        vae: Any = pipeline.model.network("vae")
        with record_modules(recorder, vae, scope="vae", methods=("decode",)):
            vae.decode(vae.denormalize(normals((1, 12, 8, 16))))
    else:
        text = {"text": normals((2, 93, 64)), "pooled": normals((2, 56), 1)}
        transformer, observer = pipeline.model.network(part), TraceObserver(recorder, run)
        with record_modules(recorder, transformer, scope=part):
            network = pipeline.family.bind(pipeline.model, text, run, 1, observer)
            network(normals((1, 12, 8, 16)), float(run.schedule.timesteps[0]), 2)
    return writer.values


def normals(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def identities(pipeline: Pipeline) -> list[Any]:
    """Everything a bug may change: compared before and after by identity."""
    objects: list[Any] = [
        *(planning.find_sampler, planning.plan_schedule, steps.Guided),
        *(modulation.sinusoids, t5.relative_position_buckets, mx.round),
        *NOISES.values(),
    ]
    owners = (Pipeline, Run, Prediction, AutoencoderKL, Tokenizer, mmdit.MMDiT, mmdit.PatchEmbed)
    for owner in (*owners, clip.CLIPTextOutput, clip.CLIPTextTransformer):
        objects += vars(owner).values()
    for name in (*ENCODERS, "transformer", "vae"):
        for _, module in walk(pipeline.model.network(name)):
            objects += [type(module), *module.values(), *vars(module).values()]
    return objects
