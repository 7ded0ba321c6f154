"""Two calibration sets: which can be compared, and the errors of their latents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lydite.calibrate.settings import plan_of
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import InputError
from lydite.evaluate.latent_errors import check_comparable, latent_errors
from support.calibration import SETTINGS

IMAGES = (("a cat", 1), ("a dog", 2))
STEPS = (0, 4, 8)


def latent(image: int, step: int) -> Any:
    return np.random.default_rng([image, step]).standard_normal((4, 8, 8), np.float32)


def made(
    folder: Path,
    *,
    images: Sequence[tuple[str, int]] = IMAGES,
    steps: Sequence[int] = STEPS,
    factor: float = 1.0,
    size: int = 8,
    **conditions: Any,
) -> CalibrationSet:
    settings = msgspec.structs.replace(
        SETTINGS, conditions={**SETTINGS.conditions, **conditions}, dtype="F32"
    )
    with Writer.start(folder, settings, plan_of(images, steps, pictures=False)) as writer:
        for image in writer.missing():
            number = image.number
            writer.commit(
                writer.builder.sample(
                    number, step, {"x": latent(number, step)[..., :size] * factor}
                )
                for step in steps
            )
    return CalibrationSet.open(folder)


def test_errors_are_relative_at_the_steps_that_both_keep(tmp_path: Path) -> None:
    with (
        made(tmp_path / "one", compute="float32") as one,
        made(tmp_path / "other", compute="bfloat16", steps=(4, 8, 11), factor=1.25) as other,
    ):
        check_comparable(one, other)
        steps, errors = latent_errors(one, other)
    assert steps == (4, 8)
    np.testing.assert_allclose(errors, np.full((2, 2), 0.25), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": (("a cat", 1), ("a fox", 2))}, "other prompts or seeds"),
        ({"images": (("a cat", 1), ("a dog", 3))}, "other prompts or seeds"),
        ({"images": IMAGES[:1]}, "other prompts or seeds"),
        ({"sampler": "heun"}, "sampler is 'euler' and 'heun'"),
        ({"guidance": 5.0}, "guidance is None and 5.0"),
    ],
)
def test_only_the_model_may_differ(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with (
        made(tmp_path / "one") as one,
        made(tmp_path / "other", **change) as other,
        pytest.raises(InputError, match=message),
    ):
        check_comparable(one, other)


def test_latents_of_two_shapes_have_no_error(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match=r"image 0: latents are \(4, 8, 8\) and \(4, 8, 6\)")
    with made(tmp_path / "one") as one, made(tmp_path / "other", size=6) as other, refused:
        latent_errors(one, other)


def test_latents_that_are_0_are_compared_by_their_difference(tmp_path: Path) -> None:
    with made(tmp_path / "one", factor=0) as one, made(tmp_path / "other") as other:
        _, errors = latent_errors(one, other)
    assert errors[0, 0] == pytest.approx(np.linalg.norm(latent(0, 0)))
