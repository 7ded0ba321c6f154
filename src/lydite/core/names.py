"""Dotted parameter names and the patterns that weight maps are written in.

`{i}` and `{j}` stand for a number, any other `{word}` for one or more characters, `*` for anything.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

Slots = dict[str, str]
_TOKEN = re.compile(r"\{(\w+)\}|\*")


def match(pattern: str, name: str) -> Slots | None:
    """What the placeholders of `pattern` stand for in `name`, or None when it does not fit."""
    matched = compiled(pattern).fullmatch(name)
    return matched.groupdict() if matched else None


def fill(pattern: str, slots: Mapping[str, str]) -> str:
    """`pattern` with its placeholders replaced."""
    return _TOKEN.sub(lambda token: slots[token.group(1)] if token.group(1) else "*", pattern)


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression, for callers that match it often."""
    parts: list[str] = []
    position = 0
    for token in _TOKEN.finditer(pattern):
        parts.append(re.escape(pattern[position : token.start()]))
        word = token.group(1)
        if word is None:
            parts.append(".*")
        else:
            parts.append(f"(?P<{word}>{'[0-9]+' if word in {'i', 'j'} else '.+'})")
        position = token.end()
    parts.append(re.escape(pattern[position:]))
    return re.compile("".join(parts), re.DOTALL)
