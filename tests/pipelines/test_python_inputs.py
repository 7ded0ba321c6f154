"""What callers pass to `plan` and `generate`: images, masks, seeds, prompts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lydite.core.errors import InputError
from lydite.core.request import Request
from lydite.pipelines.inpainting import as_mask, read_mask
from lydite.pipelines.noise import whole_seeds
from lydite.pipelines.picture import as_pixels, read_pixels
from lydite.pipelines.pipeline import Pipeline

RAMP = np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4)
REQUEST = Request("a red fox", steps=2, width=32, height=32, text_length=4)


@pytest.fixture(scope="module")
def pipeline(untrained: Path) -> Pipeline:
    return Pipeline.open(untrained)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16"])
def test_a_pillow_image_is_read_as_the_file_of_it(mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(RAMP[:, :, :3]).convert(mode if mode != "I;16" else "L")
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    assert image.mode == mode
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    image.save(path)
    assert np.array_equal(as_pixels(image), read_pixels(path))
    assert np.array_equal(as_mask(image), read_mask(path))


def test_arrays_of_bytes_are_taken_with_one_three_and_four_channels() -> None:
    grey = RAMP[:, :, 0]
    assert np.array_equal(as_pixels(RAMP[:, :, :3]), RAMP[:, :, :3])
    assert np.array_equal(as_pixels(RAMP), RAMP[:, :, :3])
    assert np.array_equal(as_pixels(grey), np.repeat(grey[:, :, None], 3, axis=2))
    assert np.array_equal(as_mask(grey), grey)
    assert np.array_equal(as_mask(grey > 40), np.where(grey > 40, 255, 0))
    assert as_mask(RAMP[:, :, :3]).shape == (6, 4)
    assert not as_mask(np.zeros((6, 4), np.uint8)).any()


REFUSED: list[tuple[Any, str]] = [
    (RAMP[:, :, :3] / 255, "found an array of float64, [6, 4, 3]. Of values from 0 to 1 make"),
    (RAMP.astype(np.int64), "found an array of int64, [6, 4, 4]."),
    (RAMP[None], "found an array of uint8, [1, 6, 4, 4]."),
    (RAMP[:, :, :2], "found an array of uint8, [6, 4, 2]."),
    (RAMP[:0], "found an array of uint8, [0, 4, 4]."),
    ("photo.png", "found str."),
    (3, "found int."),
    (RAMP.tolist(), "found list."),
]


@pytest.mark.parametrize(("given", "found"), REFUSED)
def test_every_other_image_is_refused_with_expected_and_found(given: Any, found: str) -> None:
    for name, convert in (("image", as_pixels), ("mask", as_mask)):
        with pytest.raises(InputError) as caught:
            convert(given)
        assert str(caught.value).startswith(f"{name}: expected a PIL image or an array of uint8")
        assert found in str(caught.value)


def test_floats_in_a_pillow_image_and_a_mask_of_ones_are_refused() -> None:
    floats = Image.fromarray(np.ones((4, 4), np.float32))
    for convert in (as_pixels, as_mask):
        with pytest.raises(InputError, match="its pixels are floats"):
            convert(floats)
    with pytest.raises(InputError, match="expected 255 where it is drawn anew"):
        as_mask(np.eye(4, dtype=np.uint8))


def test_a_pillow_image_and_its_array_draw_the_same(pipeline: Pipeline) -> None:
    pixels = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    drawn = [
        next(pipeline.generate(REQUEST, [1], image=image)).pixels
        for image in (pixels, Image.fromarray(pixels), np.dstack([pixels, pixels[:, :, 0]]))
    ]
    assert np.array_equal(drawn[0], drawn[1]) and np.array_equal(drawn[0], drawn[2])
    assert not np.array_equal(drawn[0], next(pipeline.generate(REQUEST, [1])).pixels)


@pytest.mark.parametrize(
    "seeds", [[0, 1], (0, 1), range(2), np.arange(2), np.arange(2, dtype=np.uint8), iter([0, 1])]
)
def test_seeds_are_any_whole_numbers(seeds: Any) -> None:
    found = whole_seeds(seeds)
    assert found == (0, 1) and all(type(seed) is int for seed in found)


WRONG_CALLS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (REQUEST, 5, {}, "seeds is 5; expected whole numbers in a list, as [1, 2], found int."),
    (REQUEST, "12", {}, "seeds is '12'; expected whole numbers in a list"),
    (REQUEST, [1.0], {}, "seeds has 1.0; expected whole numbers in a list"),
    (REQUEST, [True], {}, "seeds has True; expected whole numbers in a list"),
    (REQUEST, [2**64], {}, "seeds has 18446744073709551616; expected -2**63 to 2**64 - 1."),
    (REQUEST, [1], {"batch": "2"}, "batch is '2'; expected a whole number, at least 1."),
    ({"prompt": "a"}, [1], {}, "request: expected a Request or a prompt, found dict."),
    (None, [1], {}, "request: expected a Request or a prompt, found NoneType."),
    (REQUEST, [1], {"image": "a.png"}, "image: expected a PIL image"),
]


@pytest.mark.parametrize(("request_", "seeds", "more", "message"), WRONG_CALLS)
def test_what_is_wrong_with_a_call_is_raised_by_the_call(
    pipeline: Pipeline, request_: Any, seeds: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        pipeline.generate(request_, seeds, **more)
    assert str(caught.value).startswith(message)


def test_a_prompt_alone_is_a_request(pipeline: Pipeline) -> None:
    assert pipeline.plan("a fox").request == pipeline.plan(Request("a fox")).request


def test_a_planned_run_takes_no_second_image(pipeline: Pipeline) -> None:
    with pytest.raises(InputError, match="pass them to `plan`"):
        pipeline.generate(pipeline.plan(REQUEST), [1], image=np.zeros((32, 32, 3), np.uint8))


def test_a_pipeline_and_a_run_are_one_short_line(pipeline: Pipeline) -> None:
    run = pipeline.plan(REQUEST, np.zeros((32, 32, 3), np.uint8))
    for text, facts in (
        (repr(pipeline), (repr(pipeline.name), "Stable Diffusion 3", "float32")),
        (str(run), ("'a red fox'", "32×32", "guidance", "with an image", "euler")),
    ):
        assert "\n" not in text and len(text) < 300
        assert all(fact in text for fact in facts)
