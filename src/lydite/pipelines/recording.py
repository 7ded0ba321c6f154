"""One run recorded as a trace: every module, and what passes between the networks.

Scopes are the networks of the family. Beside them: `pipeline/token_ids` and its kin, the
conditioning, `sigmas`, `timesteps`, `noise`, at each step the guided prediction and `latents`, and
`image` before it is rounded to bytes. lydite.reference.recording uses the same names.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from math import hypot
from pathlib import Path
from typing import Any

import mlx.core as mx

from lydite.core.device import current_device
from lydite.pipelines.family import Family, Run, matches
from lydite.pipelines.observer import Observer, Observers, Stage
from lydite.pipelines.picture import Picture
from lydite.pipelines.pipeline import SILENT, Pipeline
from lydite.trace import pipeline_sites
from lydite.trace.arrays import framework_of, to_numpy
from lydite.trace.events import Header, dtype_name
from lydite.trace.mlx_capture import record_modules, write_selftest
from lydite.trace.recorder import InjectionSource, Recorder
from lydite.trace.writer import Capture, TraceWriter
from lydite.weights.load import parameters

CHANNELS_LAST = {3: "b s c", 4: "b h w c", 5: "b t h w c"}


def record(
    pipeline: Pipeline,
    run: Run,
    seed: int,
    folder: Path | str,
    *,
    capture: Capture | None = None,
    inject: InjectionSource | None = None,
    observer: Observer = SILENT,
) -> Picture:
    """Draw one picture and leave a trace in `folder`."""
    dtype = pipeline.model.dtype
    header = Header(
        framework=framework_of(mx.array(0)),
        device=current_device().describe(),
        dtype=dtype,
        conditions={
            **run.request.conditions(seed=seed, model=pipeline.name),
            "checkpoint": pipeline.model_hash,
        },
    )
    writer = TraceWriter(Path(folder), header, capture)
    with FamilyRecorder(writer, pipeline.family, inject=inject) as recorder:
        write_selftest(recorder, tuple(dict.fromkeys(("f32", "i32", dtype_name(dtype)))))
        recorder.writer.add_weights(_weights(pipeline))
        return draw_recorded(pipeline, run, seed, recorder, observer)


def draw_recorded(
    pipeline: Pipeline,
    run: Run,
    seed: int,
    recorder: "FamilyRecorder",
    observer: Observer = SILENT,
) -> Picture:
    """Draw one picture with a recorder that is already open."""
    with ExitStack() as stack:
        for name in _networks(pipeline):
            methods = ("decode",) if name == "vae" else ()
            network = pipeline.model.network(name)
            stack.enter_context(record_modules(recorder, network, scope=name, methods=methods))
        observers = Observers(TraceObserver(recorder, run), observer)
        (picture,) = pipeline.generate(run, [seed], observer=observers)
    return picture


class FamilyRecorder(Recorder):
    """Records what our modules take and give under the reference's names, step by step."""

    def __init__(
        self, writer: TraceWriter, family: Family, *, inject: InjectionSource | None = None
    ) -> None:
        super().__init__(writer, inject=inject)
        self.family = family
        self.all_steps = 0  # how many steps the values are for that modules compute at once

    def record(
        self,
        name: str,
        value: Any,
        *,
        slot: str = "out",
        kind: str = "activation",
        dims: str | None = None,
    ) -> Any:
        """As Recorder's; a value for all steps is recorded as one for each of them."""
        names = self.family.names
        if slot == "in.0" and name in self.family.encoders:
            value = super().record(pipeline_sites.token_ids(name), value, kind="ids", dims="b s")
        name, slot = names.reference_site(name, slot)
        if dims is None and value.ndim == 4 and matches(names.channels_last, name, slot):
            dims = CHANNELS_LAST[4]
        for_all = self.all_steps > 0 and value.ndim > 0 and value.shape[0] == self.all_steps
        if not for_all or matches(names.constant, name, slot):
            return super().record(name, value, slot=slot, kind=kind, dims=dims)
        parts: list[Any] = []
        for step in range(self.all_steps):
            self.step = step
            part = value[step : step + 1]
            parts.append(super().record(name, part, slot=slot, kind=kind, dims=dims))
        self.step = 0
        return mx.concatenate(parts) if self.inject else value


class TraceObserver(Observer):
    """Records what passes between the stages of a run, and counts the steps."""

    def __init__(self, recorder: FamilyRecorder, run: Run) -> None:
        self._recorder, self._run = recorder, run
        self._prediction = pipeline_sites.prediction(run.prediction.name)

    def observe(
        self,
        stage: Stage,
        value: Any,
        *,
        name: str = "",
        step: int | None = None,
        sigma: float | None = None,
    ) -> Any:
        recorder = self._recorder
        dims = CHANNELS_LAST.get(value.ndim)
        if stage in ("sigmas", "timesteps"):
            return recorder.record(f"pipeline/{stage}", value, kind="schedule")
        if stage == "conditioning":
            known, dims = recorder.family.names.conditioning.get(name, (name, None))
            return recorder.record(f"pipeline/{known}", value, dims=dims)
        if stage == "noise":
            return recorder.record(pipeline_sites.NOISE, value, kind="input", dims=dims)
        if stage == "prediction":
            return recorder.record(self._prediction, value, dims=dims)
        if stage == "latents":
            value = self._record_latents(value, step or 0, dims)
            recorder.step += 1
        elif stage == "vae_input":
            recorder.step = 0  # the loop is over
        elif stage == "image":  # before it is rounded to bytes
            image = mx.clip(value.astype(mx.float32) / 2 + 0.5, 0, 1)
            recorder.record(pipeline_sites.IMAGE, image[0], dims="h w c")
        return value

    def _record_latents(self, latents: mx.array, step: int, dims: str | None) -> mx.array:
        """In the form that the checkpoint's scheduler computes with."""
        scale = 1.0
        if self._run.variance_preserving:
            scale = hypot(1, float(self._run.schedule.sigmas[step + 1]))
        recorded = latents / scale if scale != 1 else latents
        result = self._recorder.record(pipeline_sites.LATENTS, recorded, dims=dims)
        return latents if result is recorded else result * scale

    @contextmanager
    def all_steps(self, steps: int) -> Generator[None]:
        """Computing each step's values by themselves would change their last bits."""
        self._recorder.all_steps = steps
        try:
            yield
        finally:
            self._recorder.all_steps = 0


def _networks(pipeline: Pipeline) -> Sequence[str]:
    return [name for name in pipeline.family.recorded if name in pipeline.model]


def _weights(pipeline: Pipeline) -> dict[str, Any]:
    return {
        f"{name}/{path}": to_numpy(array)
        for name in _networks(pipeline)
        for path, array in parameters(pipeline.model.network(name)).items()
    }
