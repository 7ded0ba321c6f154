"""Weights in prompts: A1111's by hand, compel's against compel."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.core.request import Request
from lydite.pipelines.picture import read_pixels, read_record
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.prompt_weights import parse, parse_a1111, parse_compel, plain_text
from support.against_diffusers import load_reference, off_by, run
from support.distance import relative_l2

REQUEST = Request(prompt="a red star", steps=2, guidance=4.0, width=32, height=40)


# The cases of A1111's own documentation of its parser, and some more.
@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("normal text", [("normal text", 1.0)]),
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        ("[a (b", [("a ", 1 / 1.1), ("b", 1.0)]),
        (r"\(literal\]", [("(literal]", 1.0)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                ("a ", 1.0),
                ("house", 1.3 * 1.1 * 1.1),
                (" ", 1.1),
                ("on", 1.1 / 1.1),
                (" a ", 1.1),
                ("hill", 0.5 * 1.1),
                (", sun, ", 1.1),
                ("sky", 1.1**4),
                (".", 1.1),
            ],
        ),
        ("", [("", 1.0)]),
        ("a)b]c:d", [("a)b]c:d", 1.0)]),
        ("(a:2)(b: .5 )[c:3]", [("a", 2.0), ("b", 0.5), ("c:3", 1 / 1.1)]),
        ("ratio 1:1.2) of a fox", [("ratio 1:1.2) of a fox", 1.0)]),
        ("(a) :2)]", [("a", 1.1), (" :2)]", 1.0)]),
        ("[a:1.2) b", [("a:1.2) b", 1 / 1.1)]),
        ("([a:1.2)", [("a:1.2)", 1.1 / 1.1)]),
        ("(a] b", [("a] b", 1.1)]),
        (r"back\\slash \x", [(r"back\slash \x", 1.0)]),
    ],
)
def test_a1111_reads_its_syntax(prompt: str, parts: list[tuple[str, float]]) -> None:
    found = parse_a1111(prompt)
    assert [text for text, _ in found] == [text for text, _ in parts]
    assert np.allclose([weight for _, weight in found], [weight for _, weight in parts], rtol=1e-9)


@pytest.mark.parametrize(
    ("weighting", "prompt"),
    [
        ("a1111", "(a:" + "9" * 400 + ")"),
        ("a1111", "(" * 4000 + "a" + ")" * 4000),
        ("compel", "(" * 4000 + "a" + ")" * 4000),
        ("compel", "( " * 4000 + "a"),
        ("compel", "a" + "+" * 9000),
        ("compel", "a" + "+" * 1000),
        ("compel", "(a)" + "9" * 400),
    ],
)
def test_weights_without_bounds_are_refused(weighting: str, prompt: str) -> None:
    with pytest.raises(InputError, match=f"weighting {weighting}"):
        parse(prompt, weighting)


def test_what_is_not_supported_is_said() -> None:
    with pytest.raises(InputError, match="BREAK"):
        parse_a1111("a star BREAK a ring")
    with pytest.raises(InputError, match="no number"):
        parse_a1111("(a:1.2.3)")
    with pytest.raises(InputError, match="blend"):
        parse_compel('("a", "b").blend(1, 2)')
    with pytest.raises(InputError, match="not supported"):
        Pipeline.open("embedded").plan(Request(prompt="a", weighting="compel"))


COMPEL = (
    "a red star",
    "a red++ star",
    "a (red blue)1.3 star",
    "a (red, (blue)-- ring)1.3, star-- .",
    "a red-haired fox, star+,blue",
    r"a \(red\) star+",
    "(unbalanced red++ star",
    "red(blue ring)1.2 star",
    "(red)1 (blue).5 (ring)0 fox--- star",
    "1.2 red+ 3",
    "(a red star)+",
    "-red +blue",
)


@pytest.mark.parity
@pytest.mark.parametrize("prompt", COMPEL)
def test_compel_is_read_as_compel_reads_it(prompt: str) -> None:
    theirs = pytest.importorskip("compel.prompt_parser").PromptParser()
    (expected,) = theirs.parse_conjunction(prompt).prompts
    found = parse_compel(prompt)
    assert [text for text, _ in found] == [part.text for part in expected.children]
    assert np.allclose([w for _, w in found], [part.weight for part in expected.children])


def test_a1111_multiplies_and_restores_the_mean(sd_folder: Any) -> None:
    ours = Pipeline.open(sd_folder("sd1"))
    prompt, negative = "a (red:1.5) [star]", "(fox)"
    request = REQUEST.replace(prompt=prompt, negative=negative, weighting="a1111")
    found = np.array(ours.encode(ours.plan(request))["text"])
    encoder = ours.model.network("text_encoder")
    words = [plain_text(text, "a1111") for text in (negative, prompt)]
    plain = np.array(encoder(ours.model.token_ids("text_encoder", words)).last, np.float64)
    tokenizer: Any = ours.model.tokenizer("text_encoder")
    counts = [len(tokenizer._encode(text)[0]) for text in ("fox", "a ", "red", " ", "star")]
    scales = np.ones((2, 77, 1))
    scales[0, 1 : 1 + counts[0]] = 1.1
    red = 1 + counts[1]
    scales[1, red : red + counts[2]] = 1.5
    star = red + counts[2] + counts[3]
    scales[1, star : star + counts[4]] = 1 / 1.1
    expected = plain * scales
    expected *= plain.mean((1, 2), keepdims=True) / expected.mean((1, 2), keepdims=True)
    assert relative_l2(found, expected) < 1e-6
    assert relative_l2(plain, expected) > 1e-3
    signs = REQUEST.replace(prompt="(a:1.5) " * 70)  # 70 tokens, and 420 signs that are not read
    assert not ours.truncated(ours.plan(signs.replace(weighting="a1111")))
    assert ours.truncated(ours.plan(signs))
    # a prompt without weights is as without the option, but for the rounding of larger products
    for name in ("a1111", "compel"):
        weighted, plain = (
            ours.encode(ours.plan(REQUEST.replace(weighting=weighting)))["text"]
            for weighting in (name, None)
        )
        assert relative_l2(np.array(weighted), np.array(plain)) < 1e-6


@pytest.mark.parity
@pytest.mark.parametrize("variant", ["sd1", "sdxl"])
def test_compel_pictures_are_as_of_compel(sd_folder: Any, variant: str) -> None:
    """Weights above 1 and below, several of these, in both prompts."""
    compel, torch = pytest.importorskip("compel"), pytest.importorskip("torch")
    xl = variant == "sdxl"
    theirs = load_reference(f"StableDiffusion{'XL' if xl else ''}Pipeline", sd_folder(variant))
    ours = Pipeline.open(sd_folder(variant))
    prompt, negative = "a red++ (blue ring)1.4, (fox star)0.6 of snow--", "(ugly)1.3 fox-"
    if xl:
        made = compel.Compel(
            tokenizer=[theirs.tokenizer, theirs.tokenizer_2],
            text_encoder=[theirs.text_encoder, theirs.text_encoder_2],
            returned_embeddings_type=compel.ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED,
            requires_pooled=[False, True],
        )
        (text, pooled), (other, other_pooled) = made(prompt), made(negative)
        given = {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": other_pooled}
    else:
        made = compel.Compel(tokenizer=theirs.tokenizer, text_encoder=theirs.text_encoder)
        text, other, given = made(prompt), made(negative), {}
    image = theirs(
        prompt_embeds=text,
        negative_prompt_embeds=other,
        **given,
        num_inference_steps=REQUEST.steps,
        guidance_scale=REQUEST.guidance,
        generator=torch.Generator().manual_seed(1),
        width=REQUEST.width,
        height=REQUEST.height,
        output_type="np",
    ).images[0]
    request = REQUEST.replace(prompt=prompt, negative=negative, weighting="compel")
    encoded = ours.encode(ours.plan(request))
    assert relative_l2(np.array(encoded["text"][1]), text[0].detach().numpy()) < 1e-5
    assert relative_l2(np.array(encoded["text"][0]), other[0].detach().numpy()) < 1e-5
    picture = next(ours.generate(request, [1])).pixels
    assert off_by(picture, image) <= 1
    without = next(ours.generate(request.replace(weighting=None), [1])).pixels
    assert np.abs(picture.astype(int) - without).max() > 5


def test_the_command_line_and_its_replay(sd_folder: Any, tmp_path: Path) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
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
    given = ("generate", "a (red:1.4) star", "--weighting", "a1111", *common, "-o", first)
    assert run(*given).exit_code == 0
    assert read_record(first).request.weighting == "a1111"
    assert run("generate", "--from", first, "-o", again, "-q").exit_code == 0
    assert np.array_equal(read_pixels(first), read_pixels(again))


@pytest.mark.parametrize(("weighting", "form"), [("a1111", "(a:{})"), ("compel", "(a){}")])
def test_weights_reach_a_thousand_and_no_further(weighting: str, form: str) -> None:
    assert parse(form.format(1000), weighting) == [("a", 1000)]
    with pytest.raises(InputError, match=r"is 1000\.5; expected -1000 to 1000"):
        parse(form.format(1000.5), weighting)
