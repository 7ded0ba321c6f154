"""What a run may not do: change a weight, depend on its neighbours, or differ from itself."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError, FileError, InputError, NotFiniteError
from lydite.pipelines.sd3 import Picture, Progress, Request, StableDiffusion3
from lydite.pipelines.sd3_files import open_files
from lydite.pipelines.watch import Debugger
from lydite.weights.load import parameter_hash, parameters

REQUEST = Request("a red fox", steps=3, width=32, height=32, text_length=4)


@pytest.fixture(scope="module")
def pipeline(untrained: Path) -> StableDiffusion3:
    return StableDiffusion3.load(untrained)


def hashes(pipeline: StableDiffusion3) -> dict[str, str]:
    return {name: parameter_hash(pipeline.networks.get(name)) for name in pipeline.files.components}


def same(first: Picture, second: Picture) -> bool:
    return np.array_equal(first.pixels, second.pixels)


def test_no_weight_changes_over_images_previews_debugging_and_an_interruption(pipeline) -> None:
    before = hashes(pipeline)

    def interrupt(progress: Progress) -> None:
        if progress.index == 1:
            raise KeyboardInterrupt

    lines: list[str] = []
    watch = Debugger({"nan", "timing", "shapes"}, lines.append)
    list(pipeline.generate(REQUEST, [1]))
    list(pipeline.generate(REQUEST, [2], on_step=lambda progress: progress.preview() and None))
    list(pipeline.generate(REQUEST, [3], watch=watch))
    with pytest.raises(KeyboardInterrupt):
        list(pipeline.generate(REQUEST, [4], on_step=interrupt))
    assert hashes(pipeline) == before
    assert any("step 2 transformer cond" in line and "ms" in line for line in lines)


def test_the_hash_notices_one_bit(untrained: Path) -> None:
    pipeline = StableDiffusion3.load(untrained)
    transformer = pipeline.networks.get("transformer")
    before = parameter_hash(transformer)
    transformer["proj_out"]["bias"] = transformer["proj_out"]["bias"] + 1e-7
    assert parameter_hash(transformer) != before


def test_two_runs_are_bit_identical(pipeline, untrained: Path) -> None:
    first = list(pipeline.generate(REQUEST, [7, 8]))
    again = list(pipeline.generate(REQUEST, [7, 8]))
    fresh = list(StableDiffusion3.load(untrained).generate(REQUEST, [7, 8]))
    assert all(map(same, first, again)) and all(map(same, first, fresh))
    assert not same(*first)


def test_an_image_does_not_depend_on_its_batch(pipeline) -> None:
    together = list(pipeline.generate(REQUEST, [1, 2, 3], batch=3))
    for picture in together:
        alone = next(pipeline.generate(REQUEST, [picture.seed]))
        off = np.abs(alone.pixels.astype(int) - picture.pixels.astype(int))
        assert off.max() <= 1 and off.mean() < 0.01  # to rounding


def test_low_memory_draws_the_same_and_keeps_nothing(pipeline, untrained: Path) -> None:
    frugal = StableDiffusion3.load(untrained, low_memory=True)
    drawn = list(frugal.generate(REQUEST, [1, 2]))
    assert all(map(same, drawn, pipeline.generate(REQUEST, [1, 2])))
    assert frugal.networks.in_memory == ()


def test_low_memory_holds_one_network_at_a_time(untrained: Path) -> None:
    sizes = {
        name: sum(value.nbytes for value in parameters(component.load(mx.float32)).values())
        for name, component in open_files(untrained).components.items()
    }
    frugal = StableDiffusion3.load(untrained, low_memory=True)
    mx.clear_cache()
    before = mx.get_active_memory()
    held: dict[str, int] = {}

    def watch(place: str, array: mx.array) -> None:
        mx.eval(array)
        held[place] = mx.get_active_memory() - before

    list(frugal.generate(REQUEST, [1], watch=watch))
    assert held["step 0 latent"] > sizes["transformer"]
    assert held["vae input"] < sizes["vae"] + sizes["transformer"] / 2
    assert held["text_encoder_2"] < sizes["text_encoder_2"] + sizes["text_encoder"]


def test_low_memory_still_decodes_what_was_finished_before_ctrl_c(untrained: Path) -> None:
    frugal = StableDiffusion3.load(untrained, low_memory=True)

    def interrupt(progress: Progress) -> None:
        if progress.seeds == (2,):
            raise KeyboardInterrupt

    pictures = frugal.generate(REQUEST, [1, 2, 3], on_step=interrupt)
    assert next(pictures).seed == 1
    with pytest.raises(KeyboardInterrupt):
        next(pictures)


def test_seeds_mean_torchs_noise_unless_mlx_is_asked_for(pipeline) -> None:
    torch_like = next(pipeline.generate(REQUEST, [1]))
    own = next(pipeline.generate(replace(REQUEST, noise="mlx"), [1]))
    again = next(pipeline.generate(replace(REQUEST, noise="mlx"), [1]))
    assert same(own, again) and not same(own, torch_like)


def test_nan_is_caught_where_it_appears(untrained: Path) -> None:
    pipeline = StableDiffusion3.load(untrained)
    transformer = pipeline.networks.get("transformer")
    transformer["proj_out"]["bias"] = mx.full(transformer["proj_out"]["bias"].shape, mx.nan)
    with pytest.raises(
        NotFiniteError, match=r"step 0 transformer uncond: 256 of 256 values are NaN"
    ):
        list(pipeline.generate(REQUEST, [1], watch=Debugger({"nan"}, print)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 33}, "width is 33; expected a multiple of 16 from 16 to 384. The nearest is 32"),
        ({"height": 4096}, "height is 4096; .* The nearest is 384"),
        ({"steps": 0}, "steps is 0"),
        ({"schedule": "carrots"}, "there is no schedule 'carrots'"),
        ({"schedule": "beta"}, "schedule beta means beta_timesteps in ComfyUI"),
        ({"sampler": "oiler"}, "there is no sampler 'oiler'"),
        ({"convention": "mflux"}, "convention is 'mflux'; expected one of lydite"),
        ({"noise": "cuda"}, "noise is 'cuda'"),
        ({"text_length": 0}, "text_length is 0"),
        ({"image": np.zeros((32, 32, 3), np.uint8), "strength": 1.5}, "strength is 1.5"),
    ],
)
def test_bad_requests_name_the_option(pipeline, change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(pipeline.generate(replace(REQUEST, **change), [1]))


def test_the_default_size_is_the_models_own(pipeline) -> None:
    assert pipeline.complete(Request("a")).width == 128


def test_img2img_takes_the_size_of_its_image(pipeline) -> None:
    request = pipeline.complete(Request("a", image=np.zeros((50, 39, 3), np.uint8)))
    assert (request.width, request.height) == (32, 48)


def test_a_tokenizer_of_another_model_is_refused(untrained: Path, tmp_path: Path) -> None:
    import json
    import shutil

    folder = shutil.copytree(untrained, tmp_path / "model")
    path = folder / "tokenizer" / "vocab.json"
    vocabulary = json.loads(path.read_text())
    vocabulary["extra</w>"] = len(vocabulary)
    swapped = {token: index for token, index in vocabulary.items()}
    swapped["<|endoftext|>"], swapped["extra</w>"] = len(vocabulary) - 1, len(vocabulary) - 2
    path.write_text(json.dumps(swapped))
    with pytest.raises(ConfigError, match="belongs to another model"):
        list(StableDiffusion3.load(folder).generate(REQUEST, [1]))


@pytest.mark.parametrize("part", ["vae", "text_encoder_2", "transformer", "tokenizer", "scheduler"])
def test_a_missing_part_is_named(untrained: Path, tmp_path: Path, part: str) -> None:
    import shutil

    folder = shutil.copytree(untrained, tmp_path / "model")
    shutil.rmtree(folder / part)
    with pytest.raises(FileError, match=part):
        StableDiffusion3.load(folder)
