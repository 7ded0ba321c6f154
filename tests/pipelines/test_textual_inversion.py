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


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"emb_params": vectors(0, 2, 16)}, "width 24"),
        ({"a": vectors(0, 24), "b": vectors(0, 24)}, "has 2 tensors"),
        ({"clip_g": vectors(0, 24)}, "one tensor"),
        ({"a": np.full((1, 24), np.nan, np.float32)}, "finite"),
        ({"a": np.ones((1, 24), np.int32)}, "floats"),
        ({"a": vectors(0, 76, 24)}, "1 to 75"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    sd_folder: Any, tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "word.safetensors", tensors)
    with pytest.raises(WeightsError, match=message):
        Pipeline.open(sd_folder("sd1"), embeddings=[(tmp_path / "word.safetensors", None)])


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
