"""Changes to files such as an accident or an attacker makes, decided by a random generator."""

import contextlib
import io
import json
import os
import random
import sqlite3
import zipfile
import zlib
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

HOSTILE_TEXT = (
    *(
        "",
        "\x1b]0;title\x07\x1b[2J",
        "a\nb",
        "\x00",
        "\ud800",
        "../../../etc/passwd",
        "/etc/passwd",
    ),
    *("evil-owner/evil-name", "https://example.invalid/x", "~", "%s%n", "{0}", "[red]", "\u202e"),
    *("x" * 5000, "é中🐈", "nan", "None", "con", "-rf", "<script>alert(1)</script>"),
)
HOSTILE: tuple[Any, ...] = (
    *HOSTILE_TEXT,
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63)),
    *(0.5, -0.0, 1e-320, 1e300, 1e6, float("nan"), float("inf"), -float("inf")),
    *([], {}, [[]], [None], [0] * 100, {"a": {}}, ["F32", "x"], [2**40, 2**40]),
)


_NO_STRUCTURE = (
    *(ValueError, LookupError, TypeError, AttributeError, OSError, SyntaxError, EOFError),
    *(MemoryError, RecursionError, sqlite3.Error, zipfile.BadZipFile, zlib.error),
)
# Options with values that they do not expect, by the first word of a command.
OPTIONS = {
    "inspect": ("--depth", "--revision"),
    "audit": ("--against", "--revision"),
    "generate": (
        *("--steps", "--guidance", "--size", "--seed", "--strength", "--sampler", "--schedule"),
        *("--out", "--batch", "--dtype", "--guidance-interval", "--guidance-rescale", "--eta"),
        *("--option", "--convention", "--text-length", "--preview", "--debug", "--negative"),
    ),
    "trace": ("--steps", "--guidance", "--points", "--budget", "--level", "--at", "--dtype"),
    "diff": ("--tolerance", "--map", "--floor"),
    "calibrate verify": ("--absmax",),
    "calibrate run": ("--workers", "--model"),
    "calibrate activations": ("--group-steps", "--group", "--part", "--out"),
    "calibrate blocks": ("--tokens", "--modules", "--budget", "--store-dtype"),
    "sampler plot": ("--steps", "--option", "--schedule", "--denoiser"),
}
NUMBERS = (
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "99999999999999999999",
    "1.5",
    "1,2",
    "0:1",
    "3x3",
    "8-1",
)


def more_words(words: tuple[str, ...], rng: random.Random) -> list[str]:
    """An option with a value that may be anything; never a name outside `out`."""
    known = OPTIONS.get(" ".join(words[:2])) or OPTIONS.get(words[0])
    if known is None or rng.random() < 0.8:
        return []
    option = rng.choice(known)
    if option == "--out":
        values = (
            "{seed:c}",
            "{guidance:d}",
            "{x}",
            "{",
            "{seed:99d}",
            "{prompt}{prompt}",
            "a\udcff",
        )
        return [option, f"out/{rng.choice(values)}.png"]
    value = str(rng.choice((*NUMBERS, *HOSTILE_TEXT))).replace("\0", "")
    return [option, value if value.isascii() else os.fsdecode(value.encode("utf-8", "ignore"))]


def mutate(path: Path, rng: random.Random, outside: Path) -> str:
    """Change one file, or what its name means; how, in a few words."""
    if rng.random() < 0.12 or path.stat().st_size > 2**24:
        return _replace(path, rng, outside)
    data = path.read_bytes()
    changed, how = _changed(path, data, rng)
    path.write_bytes(changed)
    return how


def mutate_folder(folder: Path, rng: random.Random, outside: Path) -> str:
    """Another file in a folder, or another folder in its place."""
    if rng.random() < 0.5:
        name = rng.choice(("a\x1b[2J.safetensors", ".x.part", "0" * 64 + ".safetensors", "x.json"))
        with contextlib.suppress(OSError):
            (folder / name).write_bytes(b"{}")
        return "one file more"
    moved = folder.with_name(f"{folder.name}.moved")
    folder.rename(moved)
    folder.symlink_to(rng.choice((moved, outside, Path(folder.name))))
    return "link to a folder"


def _replace(path: Path, rng: random.Random, outside: Path) -> str:
    """Something that is not the file."""
    kind = rng.choice(("gone", "folder", "pipe", "link", "loop", "zeros", "sparse", "empty"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(rng.choice(sorted(outside.iterdir())))
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**38)
    elif kind == "empty":
        path.touch()
    return kind


def _changed(path: Path, data: bytes, rng: random.Random) -> tuple[bytes, str]:
    structured = {
        ".json": _json,
        ".jsonl": _json_line,
        ".safetensors": _tensor_header,
        ".png": _png,
        ".sqlite": _sqlite,
        ".npz": _npz,
    }.get(path.suffix)
    if structured is not None and rng.random() < 0.7:
        # A file that was changed before may not have its structure any more.
        with contextlib.suppress(*_NO_STRUCTURE):
            return structured(data, rng), "structure"
    return _bytes(data, rng), "bytes"


def _bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 1, 4, 64))):
        at = rng.randrange(len(changed) or 1)
        kind = rng.randrange(6)
        if kind == 0:
            changed[at : at + 1] = (
                bytes([changed[at] ^ (1 << rng.randrange(8))]) if changed else b""
            )
        elif kind == 1:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + rng.randrange(1, 32)]
        elif kind == 4:
            changed[at:at] = rng.randbytes(rng.randrange(1, 32))
        else:
            start = rng.randrange(len(changed) or 1)
            changed[at:at] = changed[start : start + rng.randrange(1, 200)]
    return bytes(changed)


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _json(data: bytes, rng: random.Random) -> bytes:
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = _mutate_value(value, rng)
    text = _text(value)
    if rng.random() < 0.03:
        text = b'{"deep": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"
    if rng.random() < 0.03 and text.startswith(b"{") and len(text) > 2:
        text = text[:-1] + b"," + text[1:]  # every key twice
    return text


def _json_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif kind == 1:
        del lines[at]
    else:
        lines[at] = _json(lines[at], rng) + b"\n"
    return b"".join(lines)


def _mutate_value(value: Any, rng: random.Random) -> Any:
    """One node of a JSON value, found by walking down at random."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if kind < 0.2:
            return {**value, rng.choice((*HOSTILE_TEXT, f"{key}_2")): value[key]}
        return {**value, key: _mutate_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.2:
            return [*value, value[at]]
        return [*value[:at], _mutate_value(value[at], rng), *value[at + 1 :]]
    return rng.choice(HOSTILE)


def _tensor_header(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.15:
        return rng.choice((0, 1, 2**31, 2**63, length + 1)).to_bytes(8, "little") + data[8:]
    if kind < 0.35 and rest:  # NaN and Inf among the values
        at = rng.randrange(len(rest)) & ~3
        return data[: 8 + length] + rest[:at] + b"\x00\x00\xc0\x7f" + rest[at + 4 :]
    header = _json(header, rng)
    return len(header).to_bytes(8, "little") + header + rest


def _png(data: bytes, rng: random.Random) -> bytes:
    """Other metadata, or another picture altogether."""
    buffer = io.BytesIO()
    kind = rng.random()
    if kind < 0.1:
        image = Image.new(rng.choice(("1", "L", "P", "RGBA", "I;16", "LA")), (33, 17))
        image.save(buffer, rng.choice(("PNG", "TIFF")) if image.mode != "LA" else "PNG")
        return buffer.getvalue()
    if kind < 0.15:
        return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n"
    with Image.open(io.BytesIO(data)) as image:
        info = dict(image.info)
        texts = PngImagePlugin.PngInfo()
        if "lydite" in info:
            texts.add_itxt("lydite", _json(info["lydite"].encode(), rng).decode())
        image.save(buffer, "PNG", pnginfo=texts)
    return buffer.getvalue()


def _sqlite(data: bytes, rng: random.Random) -> bytes:
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(data)
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        table = rng.choice(tables)
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        column = rng.choice(columns)
        values = ("NULL", "'text'", "-1", "1e300", "x'00'", "''", "9223372036854775807")
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(
            rng.choice(
                (
                    f"UPDATE OR IGNORE {table} SET {column} = {rng.choice(values)}",
                    f"UPDATE OR IGNORE {table} SET {column} = {column} || 'x'",
                    f"DELETE FROM {table}",
                    f"DELETE FROM {table} WHERE random() % 2",
                    f"ALTER TABLE {table} RENAME TO other",
                    f"CREATE VIEW other_{table} AS SELECT * FROM {table}",
                    f"DROP TABLE {table}",
                )
            )
        )
        connection.commit()
        return bytes(connection.serialize())
    finally:
        connection.close()


def _npz(data: bytes, rng: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    name = rng.choice(sorted(members))
    kind = rng.random()
    if kind < 0.2:
        members[rng.choice(("../../x.npy", "a\x1b[2J.npy", "y.npy", "x"))] = members.pop(name)
    elif kind < 0.4:
        members[name] = members[name].replace(
            b"(", rng.choice((b"(9999999, 9999999, ", b"((((")), 1
        )
    else:
        members[name] = _bytes(members[name], rng)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", rng.choice((0, 8))) as packed:
        for member, content in members.items():
            packed.writestr(member, content)
    return buffer.getvalue()
