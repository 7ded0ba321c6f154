"""A trace told in other names: nothing lost, nothing invented, and found again."""

import re
from pathlib import Path

import numpy as np
import pytest

from lydite.trace.events import Header
from lydite.trace.store import Trace
from lydite.trace.writer import TraceWriter
from lydite.zoo.dialects import DIALECTS, retell

BLOCK = "transformer/transformer_blocks.0."
NAMES = (
    *("pipeline/sigmas", "pipeline/noise", f"{BLOCK}norm1.linear", f"{BLOCK}attn.to_q"),
    *(f"{BLOCK}attn.to_k", f"{BLOCK}attn.to_v", f"{BLOCK}attn.to_out.0", BLOCK[:-1]),
    *("transformer", "pipeline/velocity", "pipeline/latents"),
)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    with TraceWriter(tmp_path / "own", Header(dtype="float32")) as writer:
        for step in range(2):
            for name in NAMES:
                writer.add(name, draw.standard_normal((2, 3, 4)).astype(np.float32), step=step)
    return tmp_path / "own"


@pytest.mark.parametrize("name", DIALECTS)
def test_every_value_is_one_of_ours(recorded: Path, tmp_path: Path, name: str) -> None:
    dialect = DIALECTS[name]
    right = retell(recorded, tmp_path / "told", dialect)
    with Trace.open(recorded) as own, Trace.open(tmp_path / "told") as told:
        assert told.header.complete and {event.name for event in told.events} == set(right)
        for event in told.events:
            step = int(event.name[4]) if dialect.step_in_name else event.step
            refs = right[event.name]
            wanted = [refs] if isinstance(refs, str) else refs
            parts = [own.find(ref, step=step) for ref in wanted]
            values = [own.read(part) for part in parts if part is not None]
            np.testing.assert_array_equal(told.read(event), np.concatenate(values, axis=-1))


def test_the_first_release_fuses_qkv(recorded: Path, tmp_path: Path) -> None:
    right = retell(recorded, tmp_path / "told", DIALECTS["original"])
    fused = "diffusion_model/joint_blocks.0.x_block.attn.qkv"
    assert right[fused] == [f"{BLOCK}attn.to_{part}" for part in "qkv"]


@pytest.mark.parametrize("name", DIALECTS)
def test_no_two_values_get_one_name(name: str) -> None:
    dialect = DIALECTS[name]
    said = [dialect.say(name) for name in NAMES]
    kept = [each for each in said if each is not None]
    assert len(kept) == len(set(kept)) >= 5
    assert not any(re.match("transformer|pipeline/", each) for each in kept)
