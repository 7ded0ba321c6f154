"""One run of Stable Diffusion 3 recorded: every module, and what passes between the networks.

Scopes are the networks of a checkpoint. Beside them: `pipeline/token_ids`, `_2` and `_3`,
`prompt_embeds` and `pooled` with the negative prompt first, `sigmas`, `timesteps`, `noise`, at each
step `velocity` (guided) and `latents`, and `image` before it is rounded to bytes.
lydite.reference.sd3 records diffusers by the same names.
"""

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from lydite.models.layers import on_cpu
from lydite.pipelines.noise import RunNoise
from lydite.pipelines.sd3 import Picture, Progress, Request, StableDiffusion3
from lydite.pipelines.sd3_denoiser import Denoiser
from lydite.pipelines.sd3_text import Conditioning
from lydite.pipelines.watch import Watch, unwatched
from lydite.sampling.schedules import Schedule
from lydite.trace.arrays import framework_of, to_numpy
from lydite.trace.events import Header, dtype_name
from lydite.trace.mlx_capture import record_modules, write_selftest
from lydite.trace.recorder import InjectionSource, Recorder
from lydite.trace.writer import Capture
from lydite.weights.load import parameters

NETWORKS = ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae")
TOKEN_IDS = {
    "text_encoder": "pipeline/token_ids",
    "text_encoder_2": "pipeline/token_ids_2",
    "text_encoder_3": "pipeline/token_ids_3",
}

# Where a module of ours takes or gives a value under another name than diffusers' or transformers':
# name, port -> the reference's name ("": the same), port. The first that fits is taken.
RENAMES = {
    ("text_encoder*/text_model", "out.last"): ("", "out.last_hidden_state"),
    ("text_encoder*/text_model", "out.pooled"): ("", "out.pooler_output"),
    ("text_encoder*", "out.last"): ("", "out.last_hidden_state"),
    ("text_encoder*", "out.pooled"): ("", "out.text_embeds"),
    ("text_encoder_3", "out"): ("", "out.last_hidden_state"),
    ("text_encoder_3/encoder", "out"): ("", "out.last_hidden_state"),
    ("text_encoder_3/shared", "*"): ("text_encoder_3/encoder.embed_tokens", ""),
    ("transformer", "in.0"): ("", "in.hidden_states"),
    ("transformer/transformer_blocks.*.attn*.*", "*"): ("", ""),
    ("transformer/transformer_blocks.*.attn*", "in.0"): ("", "in.hidden_states"),
    ("transformer/transformer_blocks.*.attn*", "in.1"): ("", "in.encoder_hidden_states"),
    # their norms take the embedding, ours what is made of it
    ("transformer/transformer_blocks.*.norm1*", "in.1"): ("", "in.table"),
    ("transformer/norm_out", "in.1"): ("", "in.table"),
    ("transformer/transformer_blocks.*.*", "*"): ("", ""),
    ("transformer/transformer_blocks.*", "in.0"): ("", "in.encoder_hidden_states"),
    ("transformer/transformer_blocks.*", "in.1"): ("", "in.hidden_states"),
}
# Modulation is computed for all steps at once. Without an axis of steps are:
CONSTANT = (
    ("transformer/context_embedder", "*"),
    ("transformer/time_text_embed", "in.1"),
    ("transformer/time_text_embed.text_embedder*", "*"),
)
# Channels last, in a shape that may not show it; theirs come first.
IMAGES = (
    ("transformer", "*"),
    ("transformer/pos_embed*", "*"),
    ("vae/*.to_*", ""),  # tokens
    ("vae/*", "*"),
)


class SD3Recorder(Recorder):
    """Writes down what our modules take and give under the reference's names, step by step."""

    _steps = 0  # whose modulation is being computed at once

    def record(
        self,
        name: str,
        value: Any,
        *,
        slot: str = "out",
        kind: str = "activation",
        dims: str | None = None,
    ) -> Any:
        """As Recorder's; a value for all steps is kept as one for each of them."""
        if slot == "in.0" and name in TOKEN_IDS:
            value = super().record(TOKEN_IDS[name], value, kind="ids", dims="b s")
        name, slot = reference_place(name, slot)
        if dims is None and value.ndim == 4 and _covers(IMAGES, name, slot):
            dims = "b h w c"
        for_all = self._steps > 0 and value.ndim > 0 and value.shape[0] == self._steps
        if not for_all or _covers(CONSTANT, name, slot):
            return super().record(name, value, slot=slot, kind=kind, dims=dims)
        parts: list[Any] = []
        for step in range(self._steps):
            self.step = step
            part = value[step : step + 1]
            parts.append(super().record(name, part, slot=slot, kind=kind, dims=dims))
        self.step = 0
        return mx.concatenate(parts) if self.inject else value

    @contextmanager
    def all_steps(self, steps: int) -> Generator[None]:
        """While modulation is computed for every step at once, which the reference does one by one.

        Computing it one by one here too would change its last bits, and with them the picture.
        """
        self._steps = steps
        try:
            yield
        finally:
            self._steps = 0


def record(
    pipeline: StableDiffusion3,
    request: Request,
    seed: int,
    folder: Path | str,
    *,
    model: str | None = None,
    capture: Capture | None = None,
    inject: InjectionSource | None = None,
    on_step: Callable[[Progress], None] | None = None,
) -> Picture:
    """Draw one picture and leave a trace in `folder`; `model` is what the trace calls the model."""
    request = pipeline.complete(request)
    dtype = str(pipeline.dtype).removeprefix("mlx.core.")
    header = Header(
        framework=framework_of(mx.array(0)),
        device="cpu" if on_cpu() else "gpu",
        dtype=dtype,
        conditions=conditions(request, seed, model or str(pipeline.files.path)),
    )
    with SD3Recorder.start(folder, header=header, capture=capture, inject=inject) as recorder:
        write_selftest(recorder, tuple(dict.fromkeys(("f32", "i32", dtype_name(dtype)))))
        recorder.writer.add_weights(_weights(pipeline))
        return run(pipeline, request, seed, recorder, on_step=on_step)


def run(
    pipeline: StableDiffusion3,
    request: Request,
    seed: int,
    recorder: SD3Recorder,
    *,
    on_step: Callable[[Progress], None] | None = None,
) -> Picture:
    """Draw one picture, telling a recorder that is already open."""
    with ExitStack() as stack:
        for name in _names(pipeline):
            methods = ("decode",) if name == "vae" else ()
            network = pipeline.networks.get(name)
            stack.enter_context(record_modules(recorder, network, scope=name, methods=methods))
        recorded = _Recorded(pipeline, recorder)
        pictures = recorded.generate(request, [seed], on_step=on_step, watch=_watch(recorder))
        (picture,) = pictures
    return picture


def conditions(request: Request, seed: int, model: str) -> dict[str, Any]:
    """Everything that decides the run, by the names of the trace format."""
    return {
        "model": model,
        "prompt": request.prompt,
        "negative": request.negative,
        "seed": seed,
        "noise": request.noise,
        "width": request.width,
        "height": request.height,
        "steps": request.steps,
        "guidance": request.guidance,
        "sampler": "euler",
        "schedule": request.schedule,
        "text_length": request.text_length,
    }


@lru_cache(maxsize=100_000)
def reference_place(name: str, port: str) -> tuple[str, str]:
    """The name and port under which the reference has what ours has here."""
    for (names, ports), (new_name, new_port) in RENAMES.items():
        if fnmatchcase(name, names) and fnmatchcase(port, ports):
            return new_name or name, new_port or port
    return name, port


class _Recorded(StableDiffusion3):
    """The same pipeline on the same networks, which tells what passes between them."""

    def __init__(self, pipeline: StableDiffusion3, recorder: SD3Recorder) -> None:
        super().__init__(pipeline.files, dtype=pipeline.dtype)
        self.networks = pipeline.networks
        self._recorder = recorder
        self._schedule: Schedule | None = None

    def schedule(self, request: Request) -> Schedule:
        if self._schedule is None:
            made = super().schedule(request)
            record = partial(self._recorder.record, kind="schedule")
            sigmas = record("pipeline/sigmas", made.sigmas)
            timesteps = record("pipeline/timesteps", made.timesteps)
            self._schedule = replace(made, sigmas=sigmas, timesteps=timesteps)
        return self._schedule

    def encode(self, request: Request, watch: Watch = unwatched) -> Conditioning:
        found = super().encode(request, watch)
        text = self._recorder.record("pipeline/prompt_embeds", found.text, dims="b s d")
        pooled = self._recorder.record("pipeline/pooled", found.pooled, dims="b d")
        return Conditioning(text, pooled)

    def denoiser(
        self, request: Request, conditioning: Conditioning, batch: int, watch: Watch = unwatched
    ) -> Denoiser:
        with self._recorder.all_steps(len(self.schedule(request).timesteps)):
            made = super().denoiser(request, conditioning, batch, watch)
        made.on_velocity = partial(self._recorder.record, "pipeline/velocity", dims="b h w c")
        return made

    def _start(
        self, request: Request, schedule: Schedule, noise: RunNoise, watch: Watch
    ) -> mx.array:
        start = super()._start(request, schedule, noise, watch)
        return self._recorder.record("pipeline/noise", start, kind="input", dims="b h w c")


def _watch(recorder: Recorder) -> Watch:
    """Records what the pipeline shows at its boundaries, and keeps count of the steps."""

    def watch(place: str, array: mx.array) -> None:
        if re.fullmatch(r"step \d+ latent", place):
            given = recorder.record("pipeline/latents", array, dims="b h w c")
            if given is not array:
                array[:] = given  # in place: the sampler goes on from it
            recorder.step += 1
        elif place == "vae input":
            recorder.step = 0  # the loop is over
        elif place == "vae output":  # before it is rounded to bytes
            image = mx.clip(array.astype(mx.float32) / 2 + 0.5, 0, 1)
            recorder.record("pipeline/image", image[0], dims="h w c")

    return watch


def _names(pipeline: StableDiffusion3) -> list[str]:
    return [name for name in NETWORKS if name in pipeline.networks]


def _weights(pipeline: StableDiffusion3) -> dict[str, Any]:
    return {
        f"{name}/{path}": to_numpy(array)
        for name in _names(pipeline)
        for path, array in parameters(pipeline.networks.get(name)).items()
    }


@lru_cache(maxsize=100_000)
def _covers(places: tuple[tuple[str, str], ...], name: str, port: str) -> bool:
    """What the first pattern for the name says of the port."""
    for names, ports in places:
        if fnmatchcase(name, names):
            return fnmatchcase(port, ports)
    return False
