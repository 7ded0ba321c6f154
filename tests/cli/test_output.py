"""What reaches the terminal: no control characters of others, whatever its encoding."""

import io
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from rich.console import Console
from rich.table import Table

from lydite.cli.main import lydite, main
from lydite.cli.safe_streams import (
    PipeClosed,
    SafeStream,
    escape,
    progress_stream,
    safe_streams,
)
from lydite.cli.tables import wide_console
from lydite.core.errors import (
    CalibrationError,
    ConfigError,
    FileError,
    InputError,
    NotFiniteError,
    TensorFileError,
    TraceError,
    WeightsError,
)

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b1A\r\u202e"


def printed(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


def test_control_characters_are_escaped_and_colours_stay() -> None:
    red = click.style("error:", fg="red", bold=True)
    assert escape(f"{red} é\t中\n") == f"{red} é\t中\n"
    shown = escape(f"{red} {HOSTILE}")
    assert shown.startswith(red)
    assert shown.removeprefix(red).isprintable()


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F), (0x61C, 0x61C), (0x200E, 0x200F),
        (0x2028, 0x2029), (0x202A, 0x202E), (0x2066, 0x2069), (0xFEFF, 0xFEFF),
    ],
)  # fmt: skip
def test_every_character_that_controls_hides_or_reorders_is_escaped(first: int, last: int) -> None:
    for number in range(first, last + 1):
        shown = escape(f"a{chr(number)}b")
        assert shown.isascii() and shown.startswith("a\\") and shown.endswith("b")
    for number in {9, 10, 0x20, 0x7E, 0xA0, 0x200D, 0x2010, 0x2027, 0x2030, 0x2070}:
        assert escape(chr(number)) == chr(number)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_everything_printed_is_escaped(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    table = Table("×")
    table.add_row(HOSTILE)
    with safe_streams():
        click.echo(HOSTILE)
        click.echo(f"× \udcff {HOSTILE}", err=True)
        Console().print(table)
        sys.stderr.write(HOSTILE)
    for stream in (out, err):
        stream.flush()
        text = stream.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        assert text and not {0x1B, 0x07, 0x0D} & set(text)


def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InputError(f"first\nerror: second {HOSTILE}")

    monkeypatch.setattr(lydite, "main", fail)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "\x1b" not in error.replace("\x1b[31m", "")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 2), (OSError(28, "full"), 2), (KeyboardInterrupt(), 130),
        (click.Abort(), 130), (PipeClosed(), 141), (SystemExit(3), 3), (SystemExit(None), 0),
        (SystemExit("text"), 1), (click.exceptions.Exit(4), 4), (click.UsageError("no"), 2),
        (RuntimeError("[metal] out of memory"), 2), (RuntimeError("unable to allocate 9"), 2),
        *((kind("wrong"), 1) for kind in (WeightsError, NotFiniteError)),
        *((kind("wrong"), 2) for kind in (FileError, InputError, TensorFileError, ConfigError,
                                          TraceError, CalibrationError)),
    ],
)  # fmt: skip
def test_exit_codes_of_the_whole_command(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(lydite, "main", fail)
    monkeypatch.setattr("lydite.cli.main.discard_output", lambda: None)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == status


def test_a_reader_that_went_away_is_not_a_wrong_result() -> None:
    """Exit status 1 of `audit` and `diff` means that something is wrong with the model."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lydite", "sampler", "list"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == 141 and not done.stderr


def test_a_stream_is_the_users_again_afterwards(tmp_path: Path) -> None:
    before = sys.stdout
    with safe_streams():
        assert isinstance(sys.stdout, SafeStream)
    assert sys.stdout is before
    print("still open")  # noqa: T201


def test_bars_move_the_cursor_and_go_where_stderr_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", err)
    with safe_streams():
        bars = progress_stream()
        bars.write("\x1b[2K")
        bars.flush()
        sys.stderr.write("\x1b[2K")
        assert bars.encoding == "utf-8" and bars.isatty() is False
        with pytest.raises(io.UnsupportedOperation):
            bars.fileno()  # as of stderr itself
    assert printed(err) == "\x1b[2K\\x1b[2K"
    assert progress_stream() is err


@pytest.mark.parametrize("text", ["a line\n", "no line"])
def test_a_closed_pipe_is_noticed_at_a_line_and_at_a_flush(text: str) -> None:
    class Closed(io.BytesIO):
        def write(self, data: object, /) -> int:
            raise BrokenPipeError

    below = io.TextIOWrapper(Closed(), encoding="utf-8")
    stream = SafeStream(below)
    with pytest.raises(PipeClosed):
        stream.write(text)
        stream.flush()


@pytest.mark.parametrize(("variable", "color"), [("1", False), ("", None)])
def test_no_color_turns_colours_off(
    variable: str, color: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    given: list[object] = []

    def fail(**settings: object) -> None:
        given.append(settings["color"])
        raise InputError("no")

    monkeypatch.setattr(lydite, "main", fail)
    monkeypatch.setattr(click, "echo", lambda *_, color, **__: given.append(color))
    with pytest.raises(SystemExit):
        main()
    assert given == [color, color]


def test_text_in_tables_is_not_replaced_by_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    table.add_row("a :cat: on a mat")
    wide_console().print(table)
    assert "a :cat: on a mat" in capsys.readouterr().out


def test_a_line_is_printed_when_it_is_whole() -> None:
    below = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream = SafeStream(below)
    for text, seen in (("first", ""), (" line\n", "first line\n"), ("second", "first line\n")):
        stream.write(text)
        assert below.buffer.getvalue().decode() == seen  # type: ignore[attr-defined]
    stream.detach()
    assert printed(below) == "first line\nsecond"


@pytest.mark.parametrize("error", [OSError(28, "full"), BrokenPipeError(), ValueError("closed")])
def test_what_cannot_be_printed_at_the_end_is_no_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def write(self, data: object, /) -> int:
            raise error

    below = io.TextIOWrapper(Failing(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", below)
    with safe_streams():
        sys.stdout.write("no line")
    assert sys.stdout is below


@pytest.mark.parametrize("unwritable", [OSError(28, "full"), PipeClosed()])
def test_an_error_that_cannot_be_printed_has_its_exit_status(
    unwritable: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(click, "echo", Mock(side_effect=unwritable))
    monkeypatch.setattr(click.UsageError, "show", Mock(side_effect=unwritable))
    for error in (InputError("no"), click.UsageError("no"), MemoryError()):
        monkeypatch.setattr(lydite, "main", Mock(side_effect=error))
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
