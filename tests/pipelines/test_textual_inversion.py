"""Words of textual inversion against diffusers' load_textual_inversion."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError, WeightsError
from lydite.core.request import Request
from lydite.core.tensorfile import save
from lydite.pipelines.picture import read_pixels, read_record
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.textual_inversion import ANY_NAME, read_embedding
from support.against_diffusers import draw_reference, guidance, load_reference, off_by, run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity
REQUEST = Request(
    prompt="a red <toy> of kitten, star",
    negative="Ugly fox",
    steps=3,
    guidance=4.0,
    width=32,
    height=40,
)
WIDTHS = {"text_encoder": 16, "text_encoder_2": 24}  # of SDXL; of Stable Diffusion 1.x 24


def vectors(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_words_of_one_and_of_several_vectors(sd_folder: Any, tmp_path: Path) -> None:
    """In the names of diffusers and of A1111; one of them in the negative prompt."""
    files: dict[str, tuple[Path, str | None, np.ndarray]] = {}
    for number, (word, name, shape) in enumerate(
        (("<toy>", "<toy>", (24,)), ("kitten", "emb_params", (3, 24)), ("ugly", "*", (1, 24)))
    ):
        values = vectors(number, *shape)
        path = tmp_path / f"{word.strip('<>')}.safetensors"
        save(path, {name: values})
        files[word] = path, "ugly" if name == "*" else None, values
    theirs = load_reference("StableDiffusionPipeline", sd_folder("sd1"))
    for word, (path, _, _) in files.items():
        theirs.load_textual_inversion(path, token=word)
    given = [(path, word) for path, word, _ in files.values()]
    ours = Pipeline.open(sd_folder("sd1"), embeddings=given)
    picture = next(ours.generate(REQUEST, [1]))
    assert off_by(picture.pixels, draw_reference(theirs, REQUEST, 1, **guidance(REQUEST))) <= 1
    assert [word for _, word in picture.record.embeddings] == list(files)
    for left_out in range(3):  # each of them shows
        fewer = [each for number, each in enumerate(given) if number != left_out]
        other = next(Pipeline.open(sd_folder("sd1"), embeddings=fewer).generate(REQUEST, [1]))
        assert np.abs(other.pixels.astype(int) - picture.pixels).max() > 5
        assert other.record.model_hash != picture.record.model_hash
    long = REQUEST.replace(prompt="kitten " * 26)  # 78 tokens
    assert "kitten" in ours.truncated(ours.plan(long))[0]
    assert not ours.truncated(ours.plan(REQUEST.replace(prompt="kitten " * 25)))


def test_both_encoders_of_sdxl_and_the_refiner(sd_folder: Any, tmp_path: Path) -> None:
    path = tmp_path / "kitten.safetensors"
    save(path, {"clip_l": vectors(1, 2, 16), "clip_g": vectors(2, 2, 24)})
    theirs = load_reference("StableDiffusionXLPipeline", sd_folder("sdxl"))
    for name in ("", "_2"):
        encoder, tokenizer = f"text_encoder{name}", f"tokenizer{name}"
        theirs.load_textual_inversion(
            torch.tensor(vectors(1 + bool(name), 2, WIDTHS[encoder])),
            token="kitten",
            text_encoder=getattr(theirs, encoder),
            tokenizer=getattr(theirs, tokenizer),
        )
    ours = Pipeline.open(
        sd_folder("sdxl"), refiner=sd_folder("sdxl-refiner"), embeddings=[(path, None)]
    )
    assert ours.refiner
    ids = [each.model.token_ids("text_encoder_2", ["kitten"]) for each in (ours, ours.refiner)]
    assert np.array_equal(ids[0], ids[1])
    ours.refiner = None
    assert (
        off_by(
            next(ours.generate(REQUEST, [1])).pixels,
            draw_reference(theirs, REQUEST, 1, **guidance(REQUEST)),
        )
        <= 1
    )


def test_the_command_line_and_its_replay(sd_folder: Any, tmp_path: Path) -> None:
    file = tmp_path / "learnt.safetensors"
    save(file, {"emb_params": vectors(1, 2, 24)})
    common = (
        "--steps",
        2,
        "--size",
        "32x32",
        "-s",
        3,
        "-q",
        "-m",
        sd_folder("sd1"),
        "--record-paths",
    )
    first, again, plain = (tmp_path / f"{name}.png" for name in ("first", "again", "plain"))
    given = ("generate", "a red <toy>", *common)
    assert run(*given, "--embedding", f"{file}:<toy>", "-o", first).exit_code == 0
    assert run(*given, "-o", plain).exit_code == 0
    assert run("generate", "--from", first, "-o", again, "-q").exit_code == 0
    assert read_record(first).embeddings == ((str(file), "<toy>"),)
    assert np.array_equal(read_pixels(first), read_pixels(again))
    assert not np.array_equal(read_pixels(first), read_pixels(plain))
    file.rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(InputError, match="--embedding"):
        run("generate", "--from", first, "-o", again, "-q")


ONE = {ANY_NAME: "text_encoder"}  # Stable Diffusion 1.x and 2.x
TWO = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}  # XL
SIZES = {"text_encoder": 24, "text_encoder_2": 32}


@pytest.mark.parametrize(
    ("encoders", "tensors", "message"),
    [
        (ONE, {"emb_params": vectors(0, 2, 16)}, "width 24"),
        (ONE, {"a": vectors(0, 24), "b": vectors(0, 24)}, "has 2 tensors.*one tensor"),
        (ONE, {"clip_g": vectors(0, 24)}, "one tensor"),
        (ONE, {"clip_l": vectors(0, 24)}, "one tensor"),
        (ONE, {"a": np.full((1, 24), np.nan, np.float32)}, "finite"),
        (ONE, {"a": vectors(0, 1, 1, 24)}, "floats of width 24"),
        (ONE, {"a": np.float32(1)}, "floats of width 24"),
        (ONE, {"a": np.ones((1, 24), np.int32)}, "floats"),
        (ONE, {"a": np.ones((1, 24), np.complex64)}, "floats"),
        (ONE, {"a": vectors(0, 76, 24)}, "1 to 75"),
        (ONE, {"a": vectors(0, 0, 24)}, "1 to 75"),
        (TWO, {"clip_l": vectors(0, 24)}, "clip_g and clip_l"),
        (TWO, {"clip_l": vectors(0, 24), "clip_g": vectors(0, 24)}, "width 32"),
        (TWO, {"clip_l": vectors(0, 24), "clip_g": vectors(0, 32), "a": vectors(0, 1)}, "has 3"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    encoders: dict[str, str], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "word.safetensors", {name: np.asarray(x) for name, x in tensors.items()})
    with pytest.raises(WeightsError, match=message):
        read_embedding(tmp_path / "word.safetensors", None, encoders, SIZES)


@pytest.mark.parametrize(
    ("encoders", "tensors", "word"),
    [
        (ONE, {"emb_params": vectors(0, 24)}, "toy"),
        (ONE, {"<cat>": vectors(0, 75, 24)}, "<cat>"),
        (TWO, {"clip_l": vectors(0, 24), "clip_g": vectors(0, 2, 32).astype(np.float16)}, "toy"),
    ],
)
def test_a_word_is_the_tensors_or_the_files_name(
    encoders: dict[str, str], tensors: dict[str, Any], word: str, tmp_path: Path
) -> None:
    save(tmp_path / "toy.safetensors", tensors)
    found = read_embedding(tmp_path / "toy.safetensors", None, encoders, SIZES)
    assert found.token == word and set(found.vectors) == set(encoders.values())
    for name, encoder in encoders.items():
        stored = tensors[name] if name else next(iter(tensors.values()))
        vector = found.vectors[encoder]
        assert vector.dtype == np.float32 and vector.shape[1] == SIZES[encoder]
        np.testing.assert_array_equal(vector, np.atleast_2d(stored))
    assert read_embedding(tmp_path / "toy.safetensors", "x", encoders, SIZES).token == "x"


def test_a_known_word_and_another_family_are_refused(sd_folder: Any, tmp_path: Path) -> None:
    file = tmp_path / "word.safetensors"
    save(file, {"emb_params": vectors(0, 24)})
    ours = Pipeline.open(sd_folder("sd1"), embeddings=[(file, "a")])
    for word in (" ", "\udcff"):
        with pytest.raises(InputError, match="the word is"):
            Pipeline.open(sd_folder("sd1"), embeddings=[(file, word)])
    with pytest.raises(InputError, match="knows 'a' already"):
        next(ours.generate(REQUEST, [1]))
    with pytest.raises(WeightsError, match="clip_g and clip_l"):
        Pipeline.open(sd_folder("sdxl"), embeddings=[(file, None)])
    with pytest.raises(InputError, match="no textual inversion"):
        Pipeline.open("embedded", embeddings=[(file, None)])
