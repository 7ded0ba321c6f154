"""The port's side: one run of the pipeline recorded, with whatever bug is applied at the moment.

Two runs show every bug: a picture drawn from text, recorded as `lydite trace` does it, and a fixed
picture encoded by the VAE, which drawing does not run: its modules and `pipeline/image_latents`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.recording import FamilyRecorder, draw_recorded, record
from lydite.trace.events import Event, EventId, Header
from lydite.trace.mlx_capture import record_modules
from lydite.trace.recorder import InjectionSource, Recorder
from lydite.trace.writer import TraceWriter
from seeded_bugs.cases import Dump, Part
from seeded_bugs.tiny_model import MODELS, NAME, SEED, picture

ENCODING = {"model": NAME, "image": "fixed picture"}  # conditions of the second run


def record_port(
    pipeline: Pipeline,
    folder: Path,
    part: Part = "draw",
    dump: Dump | None = None,
    inject: InjectionSource | None = None,
) -> Path:
    """One run written to a new folder, with `dump` in another layout, on injected values."""
    pipeline.name, run = NAME, pipeline.plan(MODELS[pipeline.family.name].request)
    if part == "draw" and dump is None:
        record(pipeline, run, SEED, folder, inject=inject)
        return folder
    conditions = run.request.conditions(seed=SEED, model=NAME) if part == "draw" else ENCODING
    header = Header(device="cpu", dtype=pipeline.model.dtype, conditions=conditions)
    writer = DumpingWriter(folder, header, dump)
    if inject is not None:
        inject = Undumped(inject, writer)
    with FamilyRecorder(writer, pipeline.family, inject=inject) as recorder:
        if part == "draw":
            draw_recorded(pipeline, run, SEED, recorder)
        else:
            encode_picture(pipeline, recorder)
    return folder


class DumpingWriter(TraceWriter):
    """Writes values in a layout of its own, without naming the axes."""

    def __init__(self, folder: Path, header: Header, dump: Dump | None) -> None:
        super().__init__(folder, header)
        self.dump = dump
        self.shapes: dict[tuple[str, str], tuple[int, ...]] = {}  # as they are in the run

    def add(self, name: str, value: NDArray[Any], **about: Any) -> Event:
        """As TraceWriter's."""
        if self.dump is None:
            return super().add(name, value, **about)
        self.shapes[name, about["slot"]] = value.shape
        return super().add(name, self.dump(name, np.asarray(value)), **{**about, "dims": None})


@dataclass(frozen=True)
class Undumped:
    """Values in the layout of a dump, converted back to the layout of the run."""

    source: InjectionSource
    writer: DumpingWriter

    def wants(self, name: str, slot: str) -> bool:
        """As the source's."""
        return self.source.wants(name, slot)

    def value(self, event_id: EventId) -> NDArray[Any] | None:
        """The source's value in the layout of the run."""
        value, dump = self.source.value(event_id), self.writer.dump
        if value is None or dump is None:
            return value
        shape = self.writer.shapes[event_id[:2]]
        positions = dump(event_id[0], np.arange(value.size).reshape(shape))
        restored = np.empty(value.size, value.dtype)
        restored[np.ravel(positions)] = value.ravel()
        return restored.reshape(shape)


def encode_picture(pipeline: Pipeline, recorder: Recorder) -> None:
    """The VAE's encoder on a fixed picture."""
    vae: Any = pipeline.model.network("vae")
    pixels = mx.array(picture().astype(np.float32) / 127.5 - 1)[None]
    with record_modules(recorder, vae, scope="vae"):
        mean = vae.encode(pixels.astype(pipeline.model.dtype_of("vae"))).mean
    recorder.record("pipeline/image_latents", mean, dims="b h w c")
