"""Folders as `lydite quantize` makes them, without a model: records, and sets of pictures."""

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.settings import Settings, plan_of
from lydite.calibrate.store.writer import Writer
from lydite.evaluate.evaluation import Options, evaluate
from lydite.evaluate.pictures import SetPictures
from lydite.quantize.compare_exports import CANDIDATE, EVALUATION, RECORD, REFERENCE
from lydite.quantize.provenance import NAME, Provenance, UnitError

IMAGES = 5
SIDE = 32
PROVENANCE = Provenance(
    lydite="0.2",
    mlx="0.32",
    source_model="embedded",
    source_hash="0" * 64,
    set_hash="1" * 64,
    method="gptq",
    settings={"bits": 4, "group": 64},
    bits_per_weight=4.5,
    bytes_before=4000,
    bytes_after=1000,
    changed={"blocks.0.ff": 0.25, "blocks.1.ff": 0.125},
    units=[
        UnitError("blocks.0", 0.2, 0.1),
        UnitError("blocks.1", 0.2, 0.3),
        UnitError("blocks.2", 0.2, 0.2),  # data changed nothing
    ],
    activations=None,
    seed=0,
)


def draw_pictures(folder: Path, noise: float, count: int = IMAGES) -> None:
    """A set of pictures; image n differs from that without noise by n + 1 times as much."""
    plan = plan_of([(f"scene <{n}>", n) for n in range(count)], ())
    with Writer.start(folder, Settings("f00d", {}, "F32"), plan) as writer:
        for number in range(count):
            writer.commit([writer.builder.picture(number, _pixels(number, noise))])


def _pixels(number: int, noise: float) -> NDArray[np.uint8]:
    generator = np.random.default_rng(number)
    pixels = generator.uniform(60, 200, (SIDE, SIDE, 3))
    pixels += noise * (number + 1) * generator.standard_normal(pixels.shape)
    return pixels.clip(0, 255).astype(np.uint8)


def make_export(
    folder: Path, noise: float, *, method: str = "gptq", count: int = IMAGES, **record: object
) -> Path:
    """An export whose pictures have this much noise, with both sets beside its records."""
    sets = {REFERENCE: folder / EVALUATION / REFERENCE, CANDIDATE: folder / EVALUATION / CANDIDATE}
    draw_pictures(sets[REFERENCE], 0, count)
    draw_pictures(sets[CANDIDATE], noise, count)
    with (
        closing(SetPictures.open(sets[REFERENCE])) as one,
        closing(SetPictures.open(sets[CANDIDATE])) as other,
    ):
        evaluation = evaluate(one, other, set(one.names), Options(), record=record)
    (folder / RECORD).write_bytes(evaluation.to_json())
    made = msgspec.structs.replace(PROVENANCE, method=method)
    (folder / NAME).write_bytes(made.to_json())
    return folder
