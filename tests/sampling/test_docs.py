"""The page of samplers says what the code says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_samplers_is_the_registry():
    spec = importlib.util.spec_from_file_location(
        "write_sampler_docs", ROOT / "tools" / "write_sampler_docs.py"
    )
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    written = (ROOT / "docs" / "samplers.md").read_text(encoding="utf-8")
    assert written == tool.page(), "run tools/write_sampler_docs.py"


def test_no_name_is_without_a_proof():
    from lydite.sampling.registry import SAMPLERS, SCHEDULES

    everything = [*SAMPLERS.values(), *SCHEDULES.values()]
    assert [each.name for each in everything if not each.proofs or not each.source] == []
