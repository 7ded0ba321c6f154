"""Tokenizers against transformers', on the official CLIP vocabulary, and what bad files give."""

import base64
import gzip
import importlib.util
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lydite.core.errors import ConfigError, FileError, InputError, LyditeError
from lydite.tokenizers import tokenizer
from lydite.tokenizers.sentencepiece import parse_model
from lydite.tokenizers.tokenizer import load_clip_tokenizer, load_t5_tokenizer

START, END = "<|startoftext|>", "<|endoftext|>"

PROMPTS = [
    "",
    " ",
    "a cute cat",
    "A CuTe CAT",
    "  leading and trailing   ",
    "tabs\tand\nnew\r\nlines\x0b\x0c",
    "(a:1.2) [b] ((c)) {d|e}",
    "it's we'll they're I'VE don't 'quoted' ’s",
    "1234567890 3.14 ½ Ⅷ ٣",
    "😀 👨‍👩‍👧‍👦 🇫🇷 ❤️",
    "naïve café résumé",
    "nai\u0308ve cafe\u0301 re\u0301sume\u0301",
    "ﬁligree ǅungla İstanbul ẞ Σίσυφος",
    "一只可爱的猫 日本語 한국어 ไทย हिन्दी",
    f"before {END} after {START}{END}",
    f"{END.upper()} <|StartOfText|> <|endoftext>",
    "hello! world!! <!>",
    "<pad> </s> <unk> <extra_id_0> x<extra_id_99> y <cat-toy><CAT-TOY>",
    "\x00\x01\x07\x1f\x7f\x85\xa0\u200b\u200d\u2028\u3000\ufeff",
    "a\u200db",
    "supercalifragilisticexpialidocious" * 9,
    "x" * 20_000,
    "word " * 200,
    "a photograph of an astronaut riding a horse, " * 30,
    "</w> ▁ ▁▁a Ġ #version",
    "&amp; <b>html</b> \\n \\u00e9",
]


WORDS = ["photo", "astronaut", "horse", "riding", "cute", "cat", "snow", "café", "mountain", "word"]
SPIECE_SIZE = 75


def added(content: str, *, normalized: bool, **more: Any) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": normalized, "rstrip": False, "single_word": False}
    return {"content": content, **flags, **more}


def typed(content: str) -> dict[str, Any]:
    return {"__type": "AddedToken", **added(content, normalized=True)}


ROLES = {"bos_token": START, "eos_token": END, "unk_token": END}
OLD_ROLES = {role: typed(content) for role, content in ROLES.items()}
OLD_MAP = {role: added(content, normalized=True) for role, content in ROLES.items()}
TABLE = {
    "49406": added(START, normalized=True, special=True),
    "49407": added(END, normalized=False, special=True),
}
# The settings files of published tokenizers, one per way of writing them.
CLIP_FILES: dict[str, dict[str, Any]] = {
    "no settings": {},
    "stable diffusion 1.5": {
        "tokenizer_config.json": {**OLD_ROLES, "pad_token": END, "model_max_length": 77},
        "special_tokens_map.json": {**OLD_MAP, "pad_token": END},
    },
    "sdxl tokenizer_2": {  # the map counts, not the config
        "tokenizer_config.json": {**OLD_ROLES, "pad_token": END, "model_max_length": 77},
        "special_tokens_map.json": {**OLD_MAP, "pad_token": "!"},
    },
    "sd3 tokenizer": {
        "tokenizer_config.json": {
            **ROLES,
            "pad_token": END,
            "added_tokens_decoder": TABLE,
            "model_max_length": 77,
        },
    },
    "sd3 tokenizer_2": {
        "tokenizer_config.json": {
            **ROLES,
            "pad_token": "!",
            "added_tokens_decoder": {"0": added("!", normalized=False, special=True), **TABLE},
            "model_max_length": 77,
        },
        "special_tokens_map.json": {"pad_token": "not read when there is a table"},
    },
    "learned words": {
        "tokenizer_config.json": {
            **OLD_ROLES,
            "unk_token": END,  # replaces how eos_token is matched, and pad_token repeats eos_token
            "pad_token": typed(END),
            "model_max_length": 40,
            "additional_special_tokens": ["<foo>"],
        },
        "added_tokens.json": {"<cat-toy>": 49408, "<foo>": 49409},
    },
    "other marks": {
        "tokenizer_config.json": {
            "bos_token": "[start]",
            "eos_token": "[end]",
            "unk_token": "?",
            "pad_token": "?",
            "extra_special_tokens": ["<cat-toy>"],
            "additional_special_tokens": ["not read when there are extra ones"],
        },
    },
    "named words": {"tokenizer_config.json": {"extra_special_tokens": {"toy": "<cat-toy>"}}},
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def official() -> dict[str, Any]:
    """vocab.json and merges.txt of OpenAI's CLIP, built the official way."""
    spec = importlib.util.find_spec("open_clip")  # not imported: it needs torchvision
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("open_clip is not installed; its vocabulary file is needed")
    packed = Path(spec.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"
    merges = gzip.decompress(packed.read_bytes()).decode("utf-8").split("\n")
    merges = merges[1 : 49152 - 256 - 2 + 1]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [
        *letters,
        *(letter + "</w>" for letter in letters),
        *(merge.replace(" ", "") for merge in merges),
        START,
        END,
    ]
    assert len(tokens) == 49408
    return {
        "vocab.json": {token: index for index, token in enumerate(tokens)},
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
    }


@pytest.fixture(scope="session", params=CLIP_FILES)
def clip_folder(request, official, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("clip"), official | CLIP_FILES[request.param])


@pytest.fixture(scope="session")
def plain_clip_folder(official, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("clip"), official | CLIP_FILES["stable diffusion 1.5"])


@pytest.fixture(scope="session")
def spiece() -> bytes:
    """A small T5-like SentencePiece model with the character map the real one has (nmt_nfkc)."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    model = io.BytesIO()
    sentences = [f"{a} {b}'s {a}{b}, {a.title()} (of) 3 {b}s!" for a in WORDS for b in WORDS]
    trainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=SPIECE_SIZE,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        user_defined_symbols=["<user>"],
        minloglevel=2,
    )
    return model.getvalue()


T5_TABLE = {
    str(index): added(content, normalized=False, special=True)
    for index, content in enumerate(["<pad>", "</s>", "<unk>"])
} | {
    str(SPIECE_SIZE + 99 - index): added(f"<extra_id_{index}>", normalized=False, special=True)
    | {"lstrip": True, "rstrip": True}
    for index in range(100)
}
T5_CONFIG = {
    "added_tokens_decoder": T5_TABLE,
    "additional_special_tokens": [f"<extra_id_{index}>" for index in range(100)],
    "eos_token": "</s>",
    "extra_ids": 100,
    "model_max_length": 512,
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


@pytest.fixture(scope="session", params=["spiece", "spiece and config", "json", "json and config"])
def t5_folder(request, spiece, tmp_path_factory) -> Path:
    folder = write(tmp_path_factory.mktemp("t5"), {"spiece.model": spiece})
    if "json" in request.param:
        transformers = pytest.importorskip("transformers")
        saved = tmp_path_factory.mktemp("t5")
        transformers.T5Tokenizer.from_pretrained(folder).save_pretrained(saved)
        folder = saved
    if "config" in request.param:
        write(folder, {"tokenizer_config.json": T5_CONFIG})
    return folder


def expected_ids(reference: Any, text: str, length: int) -> list[int]:
    """As diffusers calls it."""
    return reference(text, padding="max_length", max_length=length, truncation=True).input_ids


@pytest.mark.parity
def test_clip_ids_equal_transformers(clip_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    reference = transformers.CLIPTokenizer.from_pretrained(clip_folder)
    reference.save_pretrained(tmp_path)  # tokenizer.json instead of vocab.json and merges.txt
    for folder in (clip_folder, tmp_path):
        ours = load_clip_tokenizer(folder)
        assert ours.max_length == min(77, reference.model_max_length)
        assert ours.vocab_size == len(reference)
        for text in PROMPTS:
            expected = expected_ids(reference, text, ours.max_length)
            assert ours(text).tolist() == expected, (folder.name, text[:80])


@pytest.mark.parity
def test_t5_ids_equal_transformers(t5_folder):
    transformers = pytest.importorskip("transformers")
    reference = transformers.T5Tokenizer.from_pretrained(t5_folder)
    for length in (256, 16, 1):
        ours = load_t5_tokenizer(t5_folder, length)
        assert ours.vocab_size == len(reference)
        for text in [*PROMPTS, "a <user> b", "Ａｂｃ ① 株式会社", "cafe\u0301 ﬁ"]:
            assert ours(text).tolist() == expected_ids(reference, text, length), text[:80]


@pytest.mark.parity
def test_any_text_gives_the_ids_of_transformers(plain_clip_folder, spiece, tmp_path):
    transformers = pytest.importorskip("transformers")
    write(tmp_path, {"spiece.model": spiece})
    clip = transformers.CLIPTokenizer.from_pretrained(plain_clip_folder)
    t5 = transformers.T5Tokenizer.from_pretrained(tmp_path)
    our_clip, our_t5 = load_clip_tokenizer(plain_clip_folder), load_t5_tokenizer(tmp_path, 64)

    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.text(st.characters(exclude_categories=["Cs"])) | st.text("aB'é!<|>\u0301 \t1中😀"))
    def check(text: str) -> None:
        assert our_clip(text).tolist() == expected_ids(clip, text, 77)
        assert our_t5(text).tolist() == expected_ids(t5, text, 64)
        assert (our_clip.truncated(text) is None) == (len(clip(text).input_ids) <= 77)

    check()


def test_official_ids(plain_clip_folder):
    tokenizer = load_clip_tokenizer(plain_clip_folder)
    ids = tokenizer("a cute cat")
    assert ids.dtype == np.int32 and ids.shape == (77,)
    assert ids.tolist() == [49406, 320, 2242, 2368] + [49407] * 73
    assert tokenizer("").tolist() == [49406] + [49407] * 76
    assert tokenizer("cat " * 200).tolist() == [49406] + [2368] * 75 + [49407]


def test_sdxl_pads_with_an_exclamation_mark_and_takes_it_out_of_words(official, tmp_path):
    folder = write(tmp_path, official | CLIP_FILES["sd3 tokenizer_2"])
    ids = load_clip_tokenizer(folder)("cat!").tolist()
    assert ids == [49406, 2368, 0, 49407] + [0] * 73  # elsewhere "!" at the end of a word is 256


def test_two_loads_give_the_same_ids(plain_clip_folder):
    first, second = load_clip_tokenizer(plain_clip_folder), load_clip_tokenizer(plain_clip_folder)
    for text in PROMPTS:
        np.testing.assert_array_equal(first(text), second(text))
        np.testing.assert_array_equal(first(text), first(text))


def test_words_that_are_added_stand_for_their_ids(plain_clip_folder):
    tokenizer = load_clip_tokenizer(plain_clip_folder)
    size, cat = tokenizer.vocab_size, tokenizer("cat").tolist()[1]
    tokenizer.add_word("<Toy>", 1)
    tokenizer.add_word("kitteh", 3)
    assert tokenizer.vocab_size == size + 4
    ids = tokenizer("cat <toy> Kitteh cat").tolist()
    assert ids[1:7] == [cat, size, size + 1, size + 2, size + 3, cat] and ids[7] == 49407
    many = "kitteh " * 25
    assert tokenizer.truncated(many) is None and tokenizer.truncated(many + "cat") == "cat"
    assert tokenizer.truncated("kitteh cat", 2 + 3) == "cat"
    ids, owners = tokenizer.join(["cat", "kitteh"])
    assert owners[:6] == [-1, 0, 1, 1, 1, -1] and len(ids) == len(owners) == 77
    for known in ("kitteh", "cat</w>", "!"):  # "!" is token 0
        with pytest.raises(InputError, match="already"):
            tokenizer.add_word(known, 1)


def test_truncated_is_the_rest_of_the_prompt_as_it_was_typed(plain_clip_folder):
    tokenizer = load_clip_tokenizer(plain_clip_folder)
    assert tokenizer.truncated("") is None
    assert tokenizer.truncated("Cat " * 75) is None
    assert tokenizer.truncated("Cat " * 75 + "DOG, É!") == "DOG, É!"
    assert tokenizer.truncated("cat " * 74 + "cat 👨‍👩‍👧 x") == "👨‍👩‍👧 x"
    kept = "x" * 20_000
    lost = tokenizer.truncated(kept)
    assert lost is not None
    kept = kept[: -len(lost)]
    assert tokenizer.truncated(kept) is None and len(kept) > 75


def test_t5_truncated(t5_folder):
    tokenizer = load_t5_tokenizer(t5_folder, 8)
    assert tokenizer.truncated("cat " * 7) is None
    assert tokenizer.truncated("cat " * 7 + "Dog\tend ") == "Dog\tend "


SMALL = {"a": 0, "b": 1, "ab": 2, "b</w>": 3, "ab</w>": 4, START: 5, END: 6}
SMALL_FILES = {"vocab.json": SMALL, "merges.txt": "#version: 0.2\r\na b</w>\r\na b\r\n"}
BPE = {"vocab": SMALL, "merges": ["a b</w>", ["a", "b"]]}


@pytest.mark.parametrize(
    "files",
    [SMALL_FILES, {"tokenizer.json": {"model": BPE, "added_tokens": []}}],
    ids=["vocab.json", "tokenizer.json"],
)
def test_small_vocabulary(tmp_path, files):
    tokenizer = load_clip_tokenizer(write(tmp_path, files))
    assert tokenizer("AB abb zz ab").tolist()[:8] == [5, 4, 2, 3, 6, 6, 4, 6]
    assert tokenizer.vocab_size == 7


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"vocab.json": None, "merges.txt": None}, FileError, "tokenizer.json or vocab.json"),
        ({"merges.txt": None}, FileError, "merges.txt"),
        ({"vocab.json": SMALL | {"b": "1"}}, ConfigError, "vocab.json.*int"),
        ({"vocab.json": SMALL | {"b": True}}, ConfigError, "vocab.json.*int"),
        ({"vocab.json": SMALL | {"b": 1.5}}, ConfigError, "vocab.json.*int"),
        ({"vocab.json": SMALL | {"b": 0}}, ConfigError, "not 0 to 6"),
        ({"vocab.json": SMALL | {"b": 7}}, ConfigError, "not 0 to 6"),
        ({"vocab.json": SMALL | {"b": -1}}, ConfigError, "not 0 to 6"),
        ({"vocab.json": '{"a": 0, "a": 1}'}, FileError, "duplicate key 'a'"),
        ({"vocab.json": '["a"]'}, FileError, "JSON object"),
        ({"vocab.json": b"\xff"}, FileError, "UTF-8"),
        ({"vocab.json": {"a": 0}, "merges.txt": ""}, ConfigError, "lacks '<|endoftext|>'"),
        ({"vocab.json": SMALL | {"\ud800": 7}}, FileError, "not valid Unicode"),
        ({"tokenizer_config.json": {"pad_token": "\ud800"}}, FileError, "not valid Unicode"),
        ({"merges.txt": "a q"}, ConfigError, "merges.txt: merge 0 'a q'"),
        ({"merges.txt": "a b</w>\nb a"}, ConfigError, "merges.txt: merge 1 'b a'"),
        ({"merges.txt": "a b c"}, ConfigError, "merges.txt: merge 0"),
        ({"merges.txt": b"a \xff"}, FileError, "merges.txt: not UTF-8"),
        ({"merges.txt": b"x" * 2000}, FileError, "merges.txt: more than 1000 bytes"),
        ({"tokenizer.json": {}}, ConfigError, "tokenizer.json"),
        ({"tokenizer.json": {"model": {"type": "Unigram"}}}, ConfigError, "Unigram"),
        ({"tokenizer.json": {"model": BPE | {"merges": [["a"]]}}}, ConfigError, "merge 0"),
        ({"tokenizer.json": {"model": BPE | {"merges": [1]}}}, ConfigError, "merges"),
        ({"tokenizer_config.json": {"pad_token": 3}}, ConfigError, "pad_token"),
        ({"tokenizer_config.json": {"pad_token": typed("")}}, ConfigError, "no text"),
        ({"tokenizer_config.json": {"eos_token": {"lstrip": True}}}, ConfigError, "eos_token"),
        ({"tokenizer_config.json": {"padding_side": "left"}}, ConfigError, "padding_side"),
        ({"tokenizer_config.json": {"truncation_side": "left"}}, ConfigError, "truncation_side"),
        ({"tokenizer_config.json": {"model_max_length": 1}}, ConfigError, "model_max_length"),
        ({"tokenizer_config.json": {"model_max_length": "77"}}, ConfigError, "model_max_length"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"3": {"content": "a"}}}},
            ConfigError,
            r"other ids than \{'a': 3\}",
        ),
        ({"added_tokens.json": {"<new>": 99}}, ConfigError, "other ids"),
        ({"special_tokens_map.json": "["}, FileError, "special_tokens_map.json: not JSON"),
    ],
)
def test_bad_clip_files_give_one_clear_error(tmp_path, monkeypatch, files, error, message):
    monkeypatch.setattr(tokenizer, "MAX_BYTES", 1000)
    files = {
        name: content for name, content in (SMALL_FILES | files).items() if content is not None
    }
    with pytest.raises(error, match=message) as raised:
        load_clip_tokenizer(write(tmp_path, files))
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_model_max_length_beyond_counting_means_77(tmp_path):
    config = {"model_max_length": 1000000000000000019884624838656}
    folder = write(tmp_path, SMALL_FILES | {"tokenizer_config.json": config})
    assert load_clip_tokenizer(folder).max_length == 77


def test_a_model_max_length_below_77_is_the_length(tmp_path):
    folder = write(tmp_path, SMALL_FILES | {"tokenizer_config.json": {"model_max_length": 10}})
    assert load_clip_tokenizer(folder)("ab " * 20).shape == (10,)


def test_merges_that_begin_with_a_number_sign_count(tmp_path):
    vocabulary = {**SMALL, "#": 7, "#</w>": 8, "##</w>": 9}
    merges = "#version: 0.2\n# #</w>\na b</w>\n"
    folder = write(tmp_path, SMALL_FILES | {"vocab.json": vocabulary, "merges.txt": merges})
    assert load_clip_tokenizer(folder)("##").tolist()[1] == 9


def test_half_a_surrogate_pair_is_an_input_error(tmp_path):
    tokenizer = load_clip_tokenizer(write(tmp_path, SMALL_FILES))
    for call in (tokenizer, tokenizer.truncated):
        with pytest.raises(InputError, match="not valid Unicode"):
            call("a \ud800 b")


PIECES = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["▁a", -1.0], ["b", -2.0]]
UNIGRAM = {"type": "Unigram", "vocab": PIECES}
MID_LETTER = b"a" * 255 + "é".encode() + b"\0"  # byte 256 is the second half of é


def trie(first: int, text: bytes) -> str:
    """A character map whose root is `first`, as tokenizer.json holds it."""
    units = struct.pack("<I", first) + bytes(1020)
    return base64.b64encode(struct.pack("<I", len(units)) + units + text).decode()


def precompiled(charsmap: str) -> dict[str, Any]:
    return {"normalizers": [{"type": "Precompiled", "precompiled_charsmap": charsmap}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"type": "BPE"}}, "BPE"),
        ({"model": UNIGRAM | {"vocab": {"a": 1}}}, "array"),
        ({"model": UNIGRAM | {"vocab": []}}, "'<unk>' as token 2"),
        ({"model": UNIGRAM | {"vocab": PIECES[1:]}}, "'<unk>' as token 2"),
        ('{"model": {"vocab": [["a", 1e999]]}}', "'1e999' is beyond"),
        ({"model": UNIGRAM, "normalizer": precompiled("?")}, "base64|padding|Incorrect"),
        ({"model": UNIGRAM, "normalizer": precompiled("AAAAAA==")}, "not whole"),
        ({"model": UNIGRAM, "normalizer": precompiled(trie(2**30, b"x\0"))}, "leads outside"),
        ({"model": UNIGRAM, "normalizer": precompiled(trie(2**8, b""))}, "does not have"),
        ({"model": UNIGRAM, "normalizer": precompiled(trie(2**8, bytes(256)))}, "does not have"),
        ({"model": UNIGRAM, "normalizer": precompiled(trie(2**8, MID_LETTER))}, "does not have"),
    ],
)
def test_bad_t5_json_gives_one_clear_error(tmp_path, content, message):
    with pytest.raises(LyditeError, match=message) as raised:
        load_t5_tokenizer(write(tmp_path, {"tokenizer.json": content}))
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "'<unk>' as token 2"),
        (b"\x0a", "number is cut off"),
        (b"\x0a\x05ab", "5 bytes at byte 2 is cut off"),
        (b"\x0b", "wire type 3"),
        (b"\xff" * 11, "longer than 10 bytes"),
        (b"\x0a\x03\x0a\x01\xff", "utf-8"),
        (b"\x0a\x02\x10\x01", "piece 0 is not text and score"),
        (b"\x0a\x02\x08\x01", "piece 0 is not text and score"),  # a number as text
        (b"\x0a\x09\x11" + bytes(8), "piece 0 is not text and score"),  # a score of 64 bits
        (b"\x12\x02\x18\x02", "not a unigram model"),
        (b"\x0a\x08\x0a\x01a\x15\x00\x00\xc0\x7f", "score of token 'a' is nan"),
    ],
)
def test_bad_spiece_gives_one_clear_error(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_t5_tokenizer(write(tmp_path, {"spiece.model": data}))
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_damaged_spiece_is_refused_or_still_runs(spiece, tmp_path):
    """No damage may reach the library in a form that stops its thread."""
    generator = np.random.default_rng(0)
    text = "".join(map(chr, range(1, 0x3000)))
    for _ in range(150):
        data = np.frombuffer(spiece, np.uint8).copy()
        where = generator.integers(0, len(data), generator.choice([1, 5, 100]))
        data[where] = generator.integers(0, 256, len(where))
        write(tmp_path, {"spiece.model": data.tobytes()})
        try:
            load_t5_tokenizer(tmp_path)(text)
        except LyditeError as error:
            assert str(tmp_path) in str(error)


def test_spiece_fields(spiece):
    model = parse_model(spiece)
    assert [text for text, _ in model.pieces[:3]] == ["<pad>", "</s>", "<unk>"]
    assert len(model.pieces) == SPIECE_SIZE
    assert model.special == ["<pad>", "</s>", "<user>"]
    assert len(model.charsmap) > 100_000


def test_missing_t5_folder(tmp_path):
    with pytest.raises(FileError, match=r"tokenizer\.json or spiece\.model"):
        load_t5_tokenizer(tmp_path / "absent")


def test_a_length_too_short_for_the_end_token(t5_folder):
    with pytest.raises(InputError, match="0 tokens"):
        load_t5_tokenizer(t5_folder, 0)


def test_a_character_map_may_end_in_its_last_byte(tmp_path):
    """The first entry that is refused above is one byte shorter."""
    content = {"model": UNIGRAM, "normalizer": precompiled(trie(2**8, bytes(257)))}
    assert load_t5_tokenizer(write(tmp_path, {"tokenizer.json": content}), 3).max_length == 3


def test_only_what_does_not_fit_is_cut_off(tmp_path):
    for length in (2, 3, 5):
        config = {"tokenizer_config.json": {"model_max_length": length}}
        tokenizer = load_clip_tokenizer(write(tmp_path, SMALL_FILES | config))
        for count in range(6):
            text = "ab " * count
            ids = tokenizer(text).tolist()
            room = length - 2
            inside = [4] * min(count, room)
            assert ids == [5, *inside, 6, *[6] * (room - len(inside))]
            assert tokenizer.truncated(text) == ("ab " * (count - room) if count > room else None)
            shorter = "ab " * (count - room + 1) if count > room - 1 else None
            if room:
                assert tokenizer.truncated(text, length - 1) == shorter


def test_added_tokens_have_their_ids_in_any_order_of_the_table(tmp_path):
    table = {f"{SMALL[END] + n}": added(f"<{n}>", normalized=False) for n in (3, 1, 2)}
    config = {"added_tokens_decoder": table}
    files = SMALL_FILES | {"tokenizer_config.json": config}
    tokenizer = load_clip_tokenizer(write(tmp_path, files))
    assert tokenizer("<1><2><3>").tolist()[1:4] == [7, 8, 9] and tokenizer.vocab_size == 10


def test_extra_tokens_count_before_additional_ones(tmp_path):
    config = {"extra_special_tokens": ["<e>"], "additional_special_tokens": ["<f>"]}
    for named, size in ((config, 8), ({"additional_special_tokens": ["<f>", "<g>"]}, 9)):
        folder = write(tmp_path, SMALL_FILES | {"tokenizer_config.json": named})
        assert load_clip_tokenizer(folder).vocab_size == size
    assert load_clip_tokenizer(folder)("<f>").tolist()[1] == 7


def test_a_word_can_be_added_once_and_its_ids_are_new(tmp_path):
    tokenizer = load_clip_tokenizer(write(tmp_path, SMALL_FILES))
    tokenizer.add_word("<toy>", 2)
    assert tokenizer.vocab_size == 9
    tokenizer.add_word("<hat>", 1)
    assert tokenizer("<toy> ab <hat>").tolist()[:6] == [5, 7, 8, 4, 9, 6]
    for known in ("<toy>", "ab", END):
        with pytest.raises(InputError, match=r"knows .* already"):
            tokenizer.add_word(known, 1)
    ids, owners = tokenizer.join(["ab", "<toy>"])
    assert ids.tolist()[:5] == [5, 4, 7, 8, 6] and owners[:6] == [-1, 0, 1, 1, -1, -1]
    assert len(owners) == len(ids) == 77


@pytest.mark.parametrize("length", [2, 3])
def test_a_length_that_holds_begin_and_end_is_enough(tmp_path, length):
    folder = write(tmp_path, SMALL_FILES | {"tokenizer_config.json": {"model_max_length": length}})
    assert load_clip_tokenizer(folder).max_length == length
