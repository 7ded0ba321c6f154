"""The network of a set's model, run again on stored latents and watched from outside.

Recording is the trace room's: classes are swapped while it lasts and given back on any exit,
nothing is written into the model, compilation is off meanwhile.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from lydite.calibrate.conditions import request_of
from lydite.calibrate.model_session import require_model
from lydite.calibrate.settings import Settings
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.shards import Entry
from lydite.core.dtypes import FLOAT_NAMES, NAMES, widen
from lydite.core.errors import CalibrationError, at
from lydite.models.mmdit import MMDiT
from lydite.pipelines.request import Request
from lydite.pipelines.sd3 import StableDiffusion3
from lydite.pipelines.sd3_denoiser import Denoiser
from lydite.pipelines.sd3_text import Conditioning
from lydite.sampling.samplers import find_sampler
from lydite.trace.arrays import to_numpy
from lydite.trace.mlx_capture import record_modules
from lydite.weights.load import to_mlx

SCOPE = "transformer"
KEPT_PROMPTS = 16  # whose conditioning is kept in memory: images repeat their prompts in turn
# Computed before the steps, for all of them at once. Without an axis of steps are:
STEPLESS = ("context_embedder", "time_text_embed.text_embedder*")


class Observer(Protocol):
    """One who looks at what modules take (`in.0` …) and give (`out`, `out.1` …)."""

    def wants(self, path: str, port: str) -> bool:
        """Whether `see` is to be told of it."""
        ...

    def see(self, path: str, port: str, value: Any) -> None:
        """An MLX array, at a module of the network."""
        ...


class Replay:
    """Runs the network on samples as the run did that drew them."""

    def __init__(self, pipeline: StableDiffusion3, settings: Settings, observer: Observer) -> None:
        request, _ = request_of(settings.conditions)
        self._pipeline, self._request = pipeline, pipeline.complete(request)
        self._sampler = find_sampler(self._request.sampler)
        self._observer = observer
        self._schedule = pipeline.schedule(self._request)
        self._shape = _latent_shape(pipeline, self._request)
        sigmas = self._schedule.sigmas[:-1].tolist()
        self._steps = {sigma: index for index, sigma in enumerate(sigmas)}
        self._strength = pipeline.strength(self._request)
        self._conditioning: dict[str, Conditioning] = {}
        self._prompt: str | None = None
        self._denoiser: Denoiser | None = None
        self._ahead: list[tuple[str, str, Any]] | None = None
        self._tables: list[tuple[str, str, Any]] = []

    def run(self, entry: Entry, x: NDArray[Any]) -> NDArray[Any]:
        """What the network makes of one sample, as the sampler gets it; the observer sees it all.

        What is computed for all steps at once is shown at each sample, for its step.
        """
        height, width, channels = self._shape
        is_float = NAMES.get(x.dtype) in FLOAT_NAMES
        if entry.sigma is None or x.shape != self._shape or not is_float:
            raise CalibrationError(
                f"{entry.label}: expected a sigma and x of {height}×{width}×{channels} floats "
                f"(height, width, channels), found sigma {entry.sigma} and x of shape "
                f"{list(x.shape)} in {x.dtype}."
            )
        denoise = self._denoiser_of(entry.prompt)
        guided = self._sampler.pair or float(self._strength(entry.sigma)) > 1
        self._show_tables(entry.sigma, None if guided else 1)
        latent = to_mlx(widen(x))[None]  # (1, h, w, C)
        if self._sampler.pair:
            return to_numpy(denoise.pair(latent, entry.sigma)[0])[0]
        return to_numpy(denoise(latent, entry.sigma))[0]

    def record(self, name: str, value: Any, *, slot: str) -> Any:
        """Told by the trace room of every value; hands it back as it is."""
        path = name.removeprefix(SCOPE).removeprefix("/")
        if self._observer.wants(path, slot):
            if self._ahead is None:
                self._observer.see(path, slot, value)
            else:
                self._ahead.append((path, slot, value))
        return value

    def _denoiser_of(self, prompt: str) -> Denoiser:
        if prompt != self._prompt or self._denoiser is None:
            request = replace(self._request, prompt=prompt)
            if prompt not in self._conditioning:
                while len(self._conditioning) >= KEPT_PROMPTS:
                    self._conditioning.pop(next(iter(self._conditioning)))
                self._conditioning[prompt] = self._pipeline.encode(request)
            self._denoiser = None  # before the next one needs its memory
            self._ahead = []
            try:
                made = self._pipeline.denoiser(request, self._conditioning[prompt], 1)
                self._tables = self._ahead
            finally:
                self._ahead = None
            self._denoiser, self._prompt = made, prompt
        return self._denoiser

    def _show_tables(self, sigma: float, prompts: int | None) -> None:
        """Tables of this step, and of the prompts that are used at it: all, or the last."""
        step = self._steps.get(sigma)  # None between two steps, where all but the text is live
        for path, port, value in self._tables:
            stepless = any(fnmatchcase(path, pattern) for pattern in STEPLESS)
            if stepless:
                if step is not None or path == STEPLESS[0]:
                    self._observer.see(path, port, value[-prompts:] if prompts else value)
            elif step is not None:
                part = value[step : step + 1]  # (1, C, D), or (1, D) of the timestep alone
                part = part[:, -prompts:] if prompts and part.ndim == 3 else part
                self._observer.see(path, port, part)


def _latent_shape(pipeline: StableDiffusion3, request: Request) -> tuple[int, int, int]:
    """Height, width and channels of what the network takes for a completed request."""
    vae: Any = pipeline.files.components["vae"].config
    assert request.width and request.height, "complete() fills the size in"
    return request.height // vae.factor, request.width // vae.factor, vae.latent_channels


def latent_of(opened: CalibrationSet, row: Row) -> NDArray[Any]:
    """The latent of a sample, held against its hash."""
    arrays = opened.read(row)
    if "x" not in arrays:
        raise CalibrationError(
            f"{at(opened.folder)}: {row.entry.label}: expected a latent x, found "
            f"{', '.join(sorted(arrays)):.80}. The network takes the samples of a run."
        )
    return arrays["x"]


@contextmanager
def replaying(
    pipeline: StableDiffusion3, settings: Settings, observer: Observer
) -> Generator[Replay]:
    """A network under observation: the set's model before, and the same to the last bit after."""
    pipeline.networks.prepare()  # recording never overlaps loading
    require_model(settings, pipeline)
    replay = Replay(pipeline, settings, observer)
    with record_modules(replay, network(pipeline), scope=SCOPE):
        yield replay


def network(pipeline: StableDiffusion3) -> MMDiT:
    """The network whose activations are looked at."""
    return cast(MMDiT, pipeline.networks.get(SCOPE))
