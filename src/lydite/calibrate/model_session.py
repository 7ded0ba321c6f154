"""A model that draws the images of one set and collects the network's inputs on the way.

The pipeline runs as it always does, with an observer that keeps what the denoiser is given; no
module is touched and nothing is written into the model.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from lydite.calibrate.request_record import request_of
from lydite.calibrate.run import Model, Sizes
from lydite.calibrate.settings import Description, Image, Settings, canonical
from lydite.calibrate.store.shards import Item, ItemBuilder
from lydite.core.dtypes import widen
from lydite.core.errors import CalibrationError, InputError, NotFiniteError, shown
from lydite.pipelines.family import Run
from lydite.pipelines.model_hash import tokenizer_files
from lydite.pipelines.observer import Observer, Stage
from lydite.pipelines.pipeline import Pipeline
from lydite.sampling.sampler_types import NoiseModel
from lydite.trace.arrays import to_numpy
from lydite.weights.load import parameter_hash

OnStep = Callable[[int], None]  # called with the number of each finished step


def open_pipeline(model: Model, dtype: str) -> Pipeline:
    """The pipeline, nothing of it loaded yet."""
    return Pipeline.open(
        model.name,
        components=model.components,
        dtype=dtype,
        fetch=model.fetch,
        bits=model.bits,
    )


class ModelSession:
    """Draws for one set with one model, which must be the model the set was begun with."""

    def __init__(self, description: Description, pipeline: Pipeline) -> None:
        self.builder, self._pipeline = ItemBuilder(description), pipeline
        self._request, _ = request_of(description.settings.conditions)
        self._first = {image.prompt: image.number for image in reversed(self.builder.plan.images)}

    @classmethod
    def open(cls, description: Description, model: Model) -> "ModelSession":
        """Load the model as the set's conditions have it; recording never overlaps loading."""
        _, dtype = request_of(description.settings.conditions)
        pipeline = open_pipeline(model, dtype)
        pipeline.model.prepare()
        require_model(description.settings, pipeline)
        return cls(description, pipeline)

    def items(
        self, image: Image, wanted: Iterable[int | None], on_step: OnStep | None = None
    ) -> list[Item]:
        """Of an image: the samples of the wanted steps, and for None what has no step.

        The picture is drawn from its noise on in any case: a step follows from all before it.
        """
        wanted = set(wanted)
        kept = frozenset(step for step in wanted if step is not None)
        inputs = _NetworkInputs(kept, on_step)
        run = self._pipeline.plan(self._request.replace(prompt=image.prompt))
        try:
            (picture,) = self._pipeline.generate(run, [image.seed], observer=inputs)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"image {image.number}, seed {image.seed}, {shown(image.prompt)}: {error}"
            ) from error
        items = [self._sample(run, image, step, inputs) for step in sorted(kept)]
        if None in wanted and self.builder.plan.pictures:
            items.append(self.builder.picture(image.number, picture.pixels))
        keeps = self.builder.plan.conditioning and self._first[image.prompt] == image.number
        if None in wanted and keeps:
            arrays = {name: widen(to_numpy(x)) for name, x in inputs.conditioning.items()}
            items.append(self.builder.conditioning(image.prompt, arrays))
        return items

    def require_unchanged(self) -> None:
        """Check that the parameters are still those the run began with."""
        if model_hash(self._pipeline) != self.builder.settings.model_hash:
            raise CalibrationError(
                "the parameters of the model changed while it drew. What this run stored cannot be "
                "trusted: make the set anew, and report this as a bug."
            )

    def _sample(self, run: Run, image: Image, step: int, inputs: "_NetworkInputs") -> Item:
        if step not in inputs.samples:
            raise CalibrationError(
                f"image {image.number}: the network was not evaluated at step {step}."
            )
        x, sigma = inputs.samples[step]
        tensors, timestep = {"x": to_numpy(x)[0]}, run.schedule.timestep_of(sigma)
        return self.builder.sample(image.number, step, tensors, sigma=sigma, timestep=timestep)


class _NetworkInputs(Observer):
    """Keeps the first input of the denoiser at each kept step, and the conditioning."""

    def __init__(self, kept: frozenset[int], on_step: OnStep | None) -> None:
        self._kept, self._on_step = kept, on_step
        self.samples: dict[int, tuple[Any, float]] = {}  # x (1, …, C) and sigma, by step
        self.conditioning: dict[str, Any] = {}

    def observe(
        self,
        stage: Stage,
        value: Any,
        *,
        name: str = "",
        step: int | None = None,
        sigma: float | None = None,
    ) -> Any:
        if stage == "denoiser_input" and step in self._kept and step not in self.samples:
            assert step is not None and sigma is not None
            self.samples[step] = value, sigma
        elif stage == "conditioning":
            self.conditioning[name] = value
        elif stage == "latents" and self._on_step and step is not None:
            self._on_step(step)
        return value


def count_steps(run: Run) -> int:
    """How many steps a run has; samplers that choose their own are refused."""
    sigmas, noise = run.schedule.sigmas.tolist(), np.zeros(1)
    denoiser = _ZeroDenoiser(run.prediction.noise_model)
    steps = run.sampler.run(denoiser, noise, sigmas, noise=lambda *_: noise, **run.options)
    count = sum(1 for _ in steps)
    if count != run.steps or "rtol" in run.sampler.options:
        raise InputError(
            f"sampler {run.sampler.name} chooses its own steps; a calibration set keeps them by "
            "their number in the schedule. Choose another sampler."
        )
    return count


class _ZeroDenoiser:
    """A denoiser that needs no network."""

    def __init__(self, noise_model: NoiseModel) -> None:
        self.noise_model = noise_model

    def __call__(self, x: Any, sigma: float) -> Any:
        return x * 0.0

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        return x * 0.0, x * 0.0


def item_sizes(pipeline: Pipeline, run: Run, *, conditioning: bool) -> Sizes:
    """How many values each item has; for the conditioning one prompt is encoded."""
    assert run.request.width and run.request.height, "a planned request has a size"
    arrays = pipeline.encode(run) if conditioning else {}
    return Sizes(
        sample=int(np.prod(run.shape)),
        picture=run.request.width * run.request.height * 3,
        conditioning=sum(array.size for array in arrays.values()),
    )


def model_hash(pipeline: Pipeline) -> str:
    """Of every parameter as it is in memory, every config, the scheduler and the tokenizers."""
    model = pipeline.model
    total = hashlib.sha256(canonical(_scheduler_identity(model.scheduler)))
    for name, component in sorted(model.components.items()):
        total.update(f"{name} {parameter_hash(model.network(name))}\n".encode())
        total.update(canonical(_config_identity(component.config)))
    for name, (folder, _) in sorted(model.tokenizers.items()):
        for file, digest in tokenizer_files(folder):
            total.update(f"{name} {file} {digest}\n".encode())
    return total.hexdigest()


def _config_identity(config: Any) -> dict[str, Any]:
    """Fields that version 0.1 did not have are left out: the hash stays as in sets that exist."""
    later = {each.name for each in fields(config) if each.metadata.get("since") == "0.2"}
    return {name: value for name, value in asdict(config).items() if name not in later}


def _scheduler_identity(raw: Any) -> dict[str, Any]:
    """What of a scheduler config decides values; of a flow with a fixed shift, as in version 0.1.

    The hash of such a model stays what it was in sets that exist.
    """
    if "FlowMatch" in str(raw.get("_class_name")) and not raw.get("use_dynamic_shifting"):
        return {"num_train_timesteps": raw["num_train_timesteps"], "shift": raw["shift"]}
    return {name: value for name, value in raw.items() if not name.startswith("_")}


def require_model(settings: Settings, pipeline: Pipeline) -> None:
    """Refuse a model other than the set's."""
    found = model_hash(pipeline)
    if found != settings.model_hash:
        raise CalibrationError(
            f"the model at {pipeline.model.path} is not the one the set was made with (its hash is "
            f"{found[:12]}, the set says {settings.model_hash[:12]}). Give the right "
            "one."
        )
