"""Prompts files, good and bad; an error names the line."""

from pathlib import Path

import pytest

from lydite.calibrate.prompts import Prompts, read_lines, read_prompts
from lydite.core.errors import LyditeError
from lydite.core.request import LONGEST_PROMPT


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", "a star\n\n  a ring \r\na fox", ("a star", "a ring", "a fox")),
        ("a.txt", b"\xef\xbb\xbfein St\xc3\xa4rn\n", ("ein Stärn",)),
        ("a.txt", "a star\ra ring\r", ("a star", "a ring")),
        ("a.txt", "one\u2028two\n", ("one\u2028two",)),
        ("a.TXT", "a, b\n", ("a, b",)),
        ("a.csv", 'id,Prompt\n1,a star\n\n2,"a ring, red"\n', ("a star", "a ring, red")),
        ("a.csv", "id;PROMPT;x\n1;a star;z\n2;a ring, red;z\n", ("a star", "a ring, red")),
        ("a.csv", 'id\tprompt\n1\t"a star; large"\n', ("a star; large",)),
        ("a.csv", "id,caption\n1,a star\n", ("a star",)),
        ("a.csv", "Text;id\na star;1\n", ("a star",)),
        ("a.csv", "caption,prompt\nno,a star\n", ("a star",)),
        ("a.csv", "a star\na ring\n", ("a star", "a ring")),
        ("a.csv", 'prompt\n"two\nlines"\n,\n', ("two\nlines",)),
        (
            "a.jsonl",
            '{"prompt": "a star", "id": 1}\n\n{"prompt": "a \\u00e4"}\n',
            ("a star", "a ä"),
        ),
    ],
)
def test_good_files(
    tmp_path: Path, name: str, data: str | bytes, expected: tuple[str, ...]
) -> None:
    assert read_prompts(write(tmp_path, name, data)) == Prompts(expected)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", "\n \n", "no prompt in it"),
        ("a.txt", b"a\nb\n\xff\xfe", "line 3 is not UTF-8"),
        ("a.txt", b"a\n\xff\nc\nd\n", "line 2 is not UTF-8"),
        ("a.txt", b"a\r\n\r\n\0\r\n", "line 3 is no text"),
        ("a.txt", b"a\n\0\n", "line 2 is no text"),
        ("a.txt", "a\n" + "x" * 10_001, "line 2 has a prompt of 10001 characters"),
        ("a.csv", "id,prompt\n1,a\n2\n", "line 3 has 1 columns, and the prompt is in column 2"),
        ("a.csv", 'prompt\na\n"b\n', "line 3 is not CSV"),
        ("a.csv", "id,prompt\n", "no prompt in it"),
        ("a.csv", "prompt,prompt\na,b\n", "two columns are called 'prompt'"),
        ("a.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', "line 2: expected .*found {'text': 'b'}"),
        ("a.jsonl", '{"prompt": "a"}\n\n["b"]\n', "line 3: expected a JSON object"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": 5}\n', "line 2: expected .*found {'prompt': 5}"),
        ("a.jsonl", '{"prompt": "\\ud800"}\n', "line 1: text that is not valid Unicode"),
        ("a.parquet", "a", "read from .txt, .csv and .jsonl"),
    ],
)
def test_bad_files_name_the_line(
    tmp_path: Path, name: str, data: str | bytes, message: str
) -> None:
    with pytest.raises(LyditeError, match=message) as caught:
        read_prompts(write(tmp_path, name, data))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("data", ["a star,1\na ring,2\n", "a star;1\na ring;2\n"])
def test_a_first_column_that_no_heading_names_is_a_guess(tmp_path: Path, data: str) -> None:
    found = read_prompts(write(tmp_path, "a.csv", data))
    assert found.guessed and found.texts[0].startswith("a star")


def test_a_file_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    for name, message in (("none.txt", "no such file"), ("folder.txt", "not a file")):
        with pytest.raises(LyditeError, match=message):
            read_prompts(tmp_path / name)


def test_a_repeated_prompt_is_used_once_and_counted(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path, "a.txt", "a\nb\n a\na\n"))
    assert found == Prompts(("a", "b"), repeated=2)


def test_images_take_the_prompts_over_and_over_with_seeds_of_their_own() -> None:
    assert Prompts(("a", "b")).images(3, 7) == [("a", 7), ("b", 8), ("a", 9)]


def test_the_longest_prompt_is_taken_and_a_line_of_no_text_is_named() -> None:
    assert read_lines(b"a\n" + b"x" * LONGEST_PROMPT, "captions") == ["a", "x" * LONGEST_PROMPT]
    with pytest.raises(LyditeError, match="captions: line 3 is no text"):
        read_lines(b"a\n\n\0\n", "captions")
