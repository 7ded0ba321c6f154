"""Prompts from a file: one a line in txt, a column of csv, a field of jsonl."""

import contextlib
import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lydite.core.config import JsonError, parse_object
from lydite.core.errors import InputError, at, is_unicode, shown
from lydite.core.files import read_bounded
from lydite.core.request import LONGEST_PROMPT

COLUMN = "prompt"
HEADINGS = (COLUMN, "caption", "text")  # of the column of a csv file, the first that is there
DELIMITERS = (",", ";", "\t")  # spreadsheets of half the world write the second
MAX_BYTES = 64 * 2**20
_Lines = Iterator[tuple[int, str]]  # the number of the line, from 1, and the prompt on it


@dataclass(frozen=True)
class Prompts:
    """The prompts of a file, each once, in its order."""

    texts: tuple[str, ...]
    repeated: int = 0  # lines left out, since an earlier one says the same
    guessed: bool = False  # they are the first of several columns, none of which has a known name

    def images(self, count: int, seed: int) -> list[tuple[str, int]]:
        """`count` images: the prompts over and over, and seeds counted from `seed`."""
        return [(self.texts[n % len(self.texts)], seed + n) for n in range(count)]


def read_prompts(path: Path) -> Prompts:
    """The prompts in `path`; errors name the line."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"{at(path)}: prompts are read from .txt, .csv and .jsonl files; found "
            f"{shown(path.suffix)}."
        )
    found: dict[str, int] = {}
    repeated = 0
    text = _text(path)
    for line, part in reader(path, text):
        prompt = part.strip()
        if not prompt:
            continue
        _check(at(path), line, prompt)
        repeated += prompt in found
        found.setdefault(prompt, line)
    if not found:
        raise InputError(f"{at(path)}: no prompt in it.")
    guessed = reader is _csv_column and _layout(path, text).guessed
    return Prompts(tuple(found), repeated, guessed)


def read_lines(data: bytes, where: str) -> list[str]:
    """The prompts of a text that has one a line, however often; `where` is for errors."""
    lines = enumerate(_lines(_decode(data, where)), 1)
    found = [(line, text.strip()) for line, text in lines if text.strip()]
    for line, prompt in found:
        _check(where, line, prompt)
    return [prompt for _, prompt in found]


def _text(path: Path) -> str:
    return _decode(read_bounded(path, MAX_BYTES, "bytes of prompts"), at(path))


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where}: line {line} is not UTF-8. Save the text as UTF-8.") from error


def _check(where: str, line: int, prompt: str) -> None:
    if len(prompt) > LONGEST_PROMPT:
        raise InputError(
            f"{where}: line {line} has a prompt of {len(prompt)} characters; at most "
            f"{LONGEST_PROMPT}."
        )
    if "\0" in prompt or not is_unicode(prompt):
        raise InputError(f"{where}: line {line} is no text ({shown(prompt)}).")


def _plain_lines(path: Path, text: str) -> _Lines:
    return enumerate(_lines(text), 1)


def _lines(text: str) -> list[str]:
    """Lines end as on Unix, Windows or an old Mac; Unicode's separators may stand in a prompt."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


@dataclass(frozen=True)
class _Layout:
    """Where the prompts of a csv file are."""

    delimiter: str = ","
    column: int = 0
    headed: bool = False  # the first row is names
    guessed: bool = False


def _layout(path: Path, text: str) -> _Layout:
    """By the first row: the delimiter and the column that give a known heading."""
    rows = {delimiter: _first_row(text, delimiter) for delimiter in DELIMITERS}
    for heading in HEADINGS:
        for delimiter, names in rows.items():
            if names.count(heading) > 1:
                raise InputError(f"{at(path)}: two columns are called {heading!r}.")
            if heading in names:
                return _Layout(delimiter, names.index(heading), headed=True)
    return _Layout(guessed=any(len(names) > 1 for names in rows.values()))


def _first_row(text: str, delimiter: str) -> list[str]:
    with contextlib.suppress(csv.Error):  # reported with its line when the file is read
        for row in _rows(text, delimiter):
            if any(cell.strip() for cell in row):
                return [cell.strip().lower() for cell in row]
    return []


def _rows(text: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)


def _csv_column(path: Path, text: str) -> _Lines:
    """The column with a known heading; without one, the first column of all rows."""
    layout = _layout(path, text)
    rows, first = _rows(text, layout.delimiter), layout.headed
    try:
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            if first:
                first = False
                continue
            if layout.column >= len(row):
                raise InputError(
                    f"{at(path)}: line {rows.line_num} has {len(row)} columns, and the prompt is "
                    f"in column {layout.column + 1}."
                )
            yield rows.line_num, row[layout.column]
    except csv.Error as error:
        raise InputError(f"{at(path)}: line {rows.line_num} is not CSV ({error}).") from error


def _json_lines(path: Path, text: str) -> _Lines:
    """The field `prompt` of an object a line."""
    for line, part in enumerate(_lines(text), 1):
        if not part.strip():
            continue
        try:
            found = parse_object(part.encode())
        except JsonError as error:
            raise InputError(f"{at(path)}: line {line}: {error}.") from error
        prompt = found.get(COLUMN)
        if not isinstance(prompt, str):
            raise InputError(
                f'{at(path)}: line {line}: expected {{"{COLUMN}": "a text"}}, found {shown(found)}.'
            )
        yield line, prompt


_READERS: dict[str, Callable[[Path, str], _Lines]] = {
    ".txt": _plain_lines,
    ".csv": _csv_column,
    ".jsonl": _json_lines,
}
