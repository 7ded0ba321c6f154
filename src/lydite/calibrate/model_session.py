"""A model ready to draw the images of one set: opened, held against the set, and checked again."""

import mlx.core as mx

from lydite.calibrate.conditions import request_of
from lydite.calibrate.run import Model
from lydite.calibrate.settings import Settings
from lydite.calibrate.store.items import Maker
from lydite.calibrate.store.set_file import Description
from lydite.calibrate.trajectories import Trajectories, model_hash
from lydite.core.errors import CalibrationError
from lydite.models.layers import on_cpu
from lydite.pipelines.hub import locate
from lydite.pipelines.sd3 import StableDiffusion3
from lydite.pipelines.sd3_files import open_files


def usual_compute() -> str:
    """The dtype networks run in unless told."""
    return "float32" if on_cpu() else "bfloat16"


def open_pipeline(model: Model, compute: str) -> StableDiffusion3:
    """The pipeline, nothing of it loaded yet."""
    extra = locate(model.components) if model.components else None
    files = open_files(locate(model.name), extra)
    return StableDiffusion3(files, dtype=getattr(mx, compute))


def release(pipeline: StableDiffusion3) -> None:
    """Let go of the networks: workers have their own."""
    pipeline.networks.low_memory = True
    for name in pipeline.networks.in_memory:
        pipeline.networks.done(name)


class Studio:
    """Draws for one set with one model, which must be the model the set was begun with."""

    def __init__(self, description: Description, pipeline: StableDiffusion3) -> None:
        self.make, self._pipeline = Maker(description), pipeline
        request, _ = request_of(description.settings.conditions)
        self.trajectories = Trajectories(pipeline, request, self.make)

    @classmethod
    def open(cls, description: Description, model: Model) -> "Studio":
        """Load the model as the set's conditions have it; recording never overlaps loading."""
        _, compute = request_of(description.settings.conditions)
        pipeline = open_pipeline(model, compute)
        pipeline.networks.prepare()
        require_model(description.settings, pipeline)
        return cls(description, pipeline)

    def require_unchanged(self) -> None:
        """Whether the parameters are still those the run began with."""
        if model_hash(self._pipeline) != self.make.settings.model_hash:
            raise CalibrationError(
                "the parameters of the model changed while it drew. What this run stored cannot be "
                "trusted: make the set anew, and report this as a bug."
            )


def require_model(settings: Settings, pipeline: StableDiffusion3) -> None:
    """Refuse a model other than the set's."""
    found = model_hash(pipeline)
    if found != settings.model_hash:
        raise CalibrationError(
            f"the model at {pipeline.files.path} is not the one the set was made with (its hash is "
            f"{found[:12]}, the set says {settings.model_hash[:12]}). Name the right one with "
            "--model."
        )
