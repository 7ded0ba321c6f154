"""The network of a set's model, run again on stored latents and watched from outside.

Values are recorded as for a trace: classes are exchanged meanwhile and given back on any exit,
nothing is written into the model, compilation is off meanwhile.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from numpy.typing import NDArray

from lydite.calibrate.model_session import require_model
from lydite.calibrate.request_record import request_of
from lydite.calibrate.settings import Settings
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.shards import Entry
from lydite.core.dtypes import FLOAT_NAMES, NAMES, widen
from lydite.core.errors import CalibrationError, at
from lydite.pipelines.family import Conditioning, matches
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.steps import Denoiser
from lydite.trace.arrays import to_numpy
from lydite.trace.mlx_capture import record_modules
from lydite.weights.load import to_mlx

KEPT_PROMPTS = 16  # whose conditioning is kept in memory: images repeat their prompts in turn


class ModuleObserver(Protocol):
    """Receives the inputs (`in.0` …) and outputs (`out`, `out.1` …) of modules."""

    def wants(self, path: str, slot: str) -> bool:
        """Whether `add` is called with this value."""
        ...

    def add(self, path: str, slot: str, value: Any) -> None:
        """An MLX array, at a module of the network."""
        ...


class _Unobserved:
    """Where nobody looks at single modules."""

    def wants(self, path: str, slot: str) -> bool:
        return False

    def add(self, path: str, slot: str, value: Any) -> None:
        raise AssertionError("nothing is wanted")


class Replay:
    """Runs the network on samples as the run did that drew them."""

    def __init__(
        self, pipeline: Pipeline, settings: Settings, observer: ModuleObserver | None = None
    ) -> None:
        request, _ = request_of(settings.conditions)
        self._pipeline, self._run = pipeline, pipeline.plan(request)
        self._observer = observer or _Unobserved()
        self._shape = (*self._run.shape[1:], self._run.shape[0])  # channels last
        self._scope, self._names = pipeline.family.network, pipeline.family.names
        sigmas = self._run.schedule.sigmas[:-1].tolist()
        self._steps = {sigma: index for index, sigma in enumerate(sigmas)}
        self._conditioning: dict[str, Conditioning] = {}
        self._prompt: str | None = None
        self._denoiser: Denoiser | None = None
        self._ahead: list[tuple[str, str, Any]] | None = None
        self._tables: list[tuple[str, str, Any]] = []

    def run(self, entry: Entry, x: NDArray[Any]) -> NDArray[Any]:
        """What the network makes of one sample, as the sampler gets it; the observer sees it all.

        What is computed for all steps at once is shown at each sample, for its step.
        """
        is_float = NAMES.get(x.dtype) in FLOAT_NAMES
        if entry.sigma is None or x.shape != self._shape or not is_float:
            raise CalibrationError(
                f"{entry.label}: expected a sigma and floats x of shape {list(self._shape)} "
                f"(channels last), found sigma {entry.sigma} and x of shape {list(x.shape)} in "
                f"{x.dtype}."
            )
        denoise = self._denoiser_of(entry.prompt)
        pair = self._run.sampler.pair
        guided = pair or float(self._run.strength(entry.sigma)) > 1
        self._show_tables(entry.sigma, None if guided else 1)
        latent = to_mlx(widen(x))[None]  # (1, …, C)
        if pair:
            return to_numpy(denoise.pair(latent, entry.sigma)[0])[0]
        return to_numpy(denoise(latent, entry.sigma))[0]

    def timestep(self, entry: Entry) -> float:
        """Of the call of the network for one sample."""
        assert entry.sigma is not None, "a sample that was run has one"
        return float(self._run.schedule.timestep_of(entry.sigma))

    def forget(self) -> None:
        """After layers were exchanged: compute again what is computed for all steps at once."""
        self._denoiser = None

    def record(self, name: str, value: Any, *, slot: str) -> Any:
        """Called with every value of a module; returns it unchanged."""
        path = name.removeprefix(self._scope).removeprefix("/")
        if self._observer.wants(path, slot):
            if self._ahead is None:
                self._observer.add(path, slot, value)
            else:
                self._ahead.append((path, slot, value))
        return value

    def _denoiser_of(self, prompt: str) -> Denoiser:
        if prompt != self._prompt or self._denoiser is None:
            run = replace(self._run, request=self._run.request.replace(prompt=prompt))
            if prompt not in self._conditioning:
                while len(self._conditioning) >= KEPT_PROMPTS:
                    self._conditioning.pop(next(iter(self._conditioning)))
                self._conditioning[prompt] = self._pipeline.encode(run)
            self._denoiser = None  # before the next one needs its memory
            self._ahead = []
            try:
                denoiser = self._pipeline.denoiser(run, self._conditioning[prompt], 1)
                self._tables = self._ahead
            finally:
                self._ahead = None
            self._denoiser, self._prompt = denoiser, prompt
        return self._denoiser

    def _show_tables(self, sigma: float, prompts: int | None) -> None:
        """Tables of this step, and of the prompts that are used at it: all, or the last."""
        step = self._steps.get(sigma)  # None between two steps, where only the text is constant
        for path, slot, value in self._tables:
            name = f"{self._scope}/{path}"
            if matches(self._names.constant, name, slot):
                if step is not None or matches(self._names.once, name, slot):
                    self._observer.add(path, slot, value[-prompts:] if prompts else value)
            elif step is not None:
                part = value[step : step + 1]  # (1, C, D), or (1, D) of the timestep alone
                part = part[:, -prompts:] if prompts and part.ndim == 3 else part
                self._observer.add(path, slot, part)


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
    pipeline: Pipeline, settings: Settings, observer: ModuleObserver
) -> Generator[Replay]:
    """A network under observation: the set's model before, and the same to the last bit after."""
    pipeline.model.prepare()  # recording never overlaps loading
    require_model(settings, pipeline)
    replay = Replay(pipeline, settings, observer)
    with record_modules(replay, network(pipeline), scope=pipeline.family.network):
        yield replay


def network(pipeline: Pipeline) -> Any:
    """The network whose activations are collected."""
    return pipeline.model.network(pipeline.family.network)
