"""A trace written with other names: every value is one of the recorded ones."""

import re
from pathlib import Path

import numpy as np
import pytest

from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter
from seeded_bugs.renamed_traces import NAMINGS, write_renamed

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


@pytest.mark.parametrize("name", NAMINGS)
def test_every_value_is_one_of_ours(recorded: Path, tmp_path: Path, name: str) -> None:
    naming = NAMINGS[name]
    right = write_renamed(recorded, tmp_path / "renamed", naming)
    with Trace.open(recorded) as own, Trace.open(tmp_path / "renamed") as renamed:
        assert renamed.header.complete and {event.name for event in renamed.events} == set(right)
        for event in renamed.events:
            step = int(event.name[4]) if naming.step_in_name else event.step
            refs = right[event.name]
            wanted = [refs] if isinstance(refs, str) else refs
            parts = [own.find(ref, step=step) for ref in wanted]
            values = [own.read(part) for part in parts if part is not None]
            np.testing.assert_array_equal(renamed.read(event), np.concatenate(values, axis=-1))


def test_the_first_release_fuses_qkv(recorded: Path, tmp_path: Path) -> None:
    right = write_renamed(recorded, tmp_path / "renamed", NAMINGS["original"])
    fused = "diffusion_model/joint_blocks.0.x_block.attn.qkv"
    assert right[fused] == [f"{BLOCK}attn.to_{part}" for part in "qkv"]


@pytest.mark.parametrize("name", NAMINGS)
def test_no_two_values_get_one_name(name: str) -> None:
    naming = NAMINGS[name]
    names = [new for name in NAMES if (new := naming.new_name(name)) is not None]
    assert len(names) == len(set(names)) >= 5
    assert not any(re.match("transformer|pipeline/", name) for name in names)
