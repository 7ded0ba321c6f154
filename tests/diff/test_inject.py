"""Injection: every bug is one wrong place, whatever it spoils downstream."""

from pathlib import Path

import pytest

from lydite.diff.inject import isolate
from lydite.trace.store import Trace
from toynet import Options, record

SOURCES = {
    "transpose": ["net/blocks.2.attn.to_v"],
    "swap": ["net/blocks.2.attn.to_k", "net/blocks.2.attn.to_v"],
    "root": ["net/blocks.2.attn"],
    "gelu": ["net/blocks.2.mlp.act"],
    "bias": ["net/blocks.2.mlp"],
    "rms": ["net/blocks.2.norm"],
    "unbiased": ["net/blocks.2.norm"],
    "": [],
    "stage": [],
}


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("bug", SOURCES)
def test_one_bug_is_one_wrong_place(bug: str, channels_first: bool, tmp_path: Path) -> None:
    def run(folder: Path, inject: Path | None) -> Path:
        options = Options(
            bug=bug, channels_first=channels_first, shuffle=True, inject=inject, steps=1
        )
        return record(folder, options)

    reference = Trace.open(record(tmp_path / "ref", side="reference", steps=1))
    port = Trace.open(run(tmp_path / "port", None))
    found = isolate(reference, port, lambda values, out: _none(run(out, values)), tmp_path)
    assert [row.site for row in found.sources] == SOURCES[bug]
    assert found.verdict == ("diverge" if SOURCES[bug] else "agree")


def _none(_: object) -> None:
    return None
