"""Qwen2's tokenizer against transformers', on a small vocabulary, and Qwen-Image's template."""

import json
from pathlib import Path

import pytest

from lydite.tokenizers.templates import QWEN_IMAGE, PromptTemplate, TemplateTokenizer
from lydite.tokenizers.tokenizer import QWEN2_WORDS, load_qwen2_tokenizer
from support import tiny_qwen_image

PROMPTS = [
    "",
    " ",
    "a cute cat",
    "A Cute CAT, it's we'LL they'RE DON'T 'quoted' ’s",
    "  leading and trailing   ",
    "tabs\tand\nnew\r\nlines\n\n\n  then spaces\x0b\x0c",
    "1234567890 3.14 ½ Ⅷ ٣",
    "😀 👨‍👩‍👧‍👦 🇫🇷 ❤️ !!! ?!\n",
    "naïve nai\u0308ve ﬁligree İstanbul",
    "一只可爱的猫 日本語 한국어 ไทย हिन्दी",
    "before <|im_end|> after<|im_start|>user\n<|endoftext|> <|IM_END|> <tool_call> x<tool_call>",
    "\x00\x01\x7f\x85\xa0\u200b\u2028\u3000\ufeff",
    "supercalifragilistic" * 20,
    "a photograph of an astronaut riding a horse, " * 60,
    "Ġ Ċ {braces} %s",
]
FORMS = ["tokenizer.json", "vocab.json"]


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    tiny_qwen_image.write_tokenizer(folder)
    if request.param == "tokenizer.json":
        transformers = pytest.importorskip("transformers")
        transformers.Qwen2Tokenizer.from_pretrained(folder).save_pretrained(folder)
        assert (folder / "tokenizer.json").is_file()
        (folder / "vocab.json").unlink()
    return folder


@pytest.mark.parity
@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_are_those_of_the_reference(folder: Path, prompt: str) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.Qwen2Tokenizer.from_pretrained(folder)
    ours = load_qwen2_tokenizer(folder, 300)
    for text in (prompt, QWEN_IMAGE(prompt)):
        expected = reference([text], max_length=300, padding=True, truncation=True).input_ids[0]
        assert ours(text).tolist() == expected
    assert ours.vocab_size == len(reference)


@pytest.mark.parity
@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized", "special"])
def test_flags_of_added_tokens_mean_what_they_mean_in_the_reference(
    flag: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tiny_qwen_image.write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    table = config["added_tokens_decoder"]
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    new = {"content": "<cafe\u0301>", **flags, flag: True}
    table[str(max(map(int, table)) + 1)] = new
    path.write_text(json.dumps(config))
    reference, ours = (
        transformers.Qwen2Tokenizer.from_pretrained(tmp_path),
        load_qwen2_tokenizer(tmp_path, 300),
    )
    for text in ("a  <cafe\u0301>  b", "x<cafe\u0301>y <cafe\u0301>", "<caf\u00e9> <CAFE\u0301>"):
        assert ours(text).tolist() == reference(text).input_ids, text


@pytest.mark.parity
def test_the_template_is_the_pipelines(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    pipeline = diffusers.QwenImagePipeline(None, None, None, None, None)
    prompt = "a {cat} and %s"
    assert QWEN_IMAGE(prompt) == pipeline.prompt_template_encode.format(prompt)
    assert QWEN_IMAGE.dropped == pipeline.prompt_template_encode_start_idx


def test_the_text_before_the_prompt_makes_as_many_pieces_as_are_dropped() -> None:
    """Each word, mark and special token is one token of the published vocabulary."""
    regex = pytest.importorskip("regex")

    special = regex.split(r"(<\|im_start\|>|<\|im_end\|>)", QWEN_IMAGE.before)
    pieces = [
        piece
        for text in special
        if text
        for piece in ([text] if text.startswith("<|im_") else regex.findall(QWEN2_WORDS, text))
    ]
    assert len(pieces) == QWEN_IMAGE.dropped


@pytest.mark.parametrize(
    ("room", "expected"), [(6, None), (5, None), (4, None), (3, "d"), (1, "bcd"), (0, "abcd")]
)
def test_only_cut_off_words_of_the_prompt_are_reported(
    tmp_path: Path, room: int, expected: str | None
) -> None:
    tiny_qwen_image.write_tokenizer(tmp_path)
    template = PromptTemplate(before="<|im_start|>", after="<|im_end|>\n", dropped=1)
    tokenizer = load_qwen2_tokenizer(tmp_path, 1 + room)
    assert template.truncated("abcd", tokenizer) == expected


@pytest.mark.parametrize("dropped", [0, 1, 5])
def test_a_prompt_is_cut_off_where_its_features_are(tmp_path: Path, dropped: int) -> None:
    """Features of the first `dropped` tokens are not used, and so take no room."""
    tiny_qwen_image.write_tokenizer(tmp_path)
    template = PromptTemplate(before="<|im_start|>" * dropped, after="", dropped=dropped)
    tokenizer = TemplateTokenizer(load_qwen2_tokenizer(tmp_path, dropped + 9), template, 6)
    for length in range(9):
        text = "=-+=-+=-+"[:length]
        used = tokenizer(text)[dropped:]
        assert len(used) == length
        assert tokenizer.truncated(text) == (text[6:] or None)
