"""The runner scores what it should: sites, blocks, same arrays, false alarms."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.trace.events import Header
from lydite.trace.writer import TraceWriter
from seeded_bugs import baselines, scoring
from seeded_bugs.cases import Site, controls, find_bug

NAMES = [f"transformer/transformer_blocks.{block}.attn.to_q" for block in (0, 1)]


@dataclass(frozen=True)
class FakeVerdict:
    verdict: str = "diverge"
    site: str | None = None
    slot: str | None = None
    step: int | None = 0
    flagged: int = 3
    findings: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Wrong:
    site: str
    slot: str = "out"
    step: int = 0
    wrong: bool = True


@dataclass(frozen=True)
class Rows:
    """A verdict that gives rows, as `lydite diff` does."""

    rows: tuple[Wrong, ...]
    sources: tuple[Wrong, ...] = ()
    verdict: str = "diverge"
    site: str | None = NAMES[0]
    slot: str | None = "out"
    step: int | None = 0


def write(folder: Path, change: float = 0.0, *, first: bool = False, dtype: str = "f32") -> Path:
    """Two linears that share nothing, and the module around the second one."""
    x = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    with TraceWriter(folder, Header()) as writer:
        for block, name in enumerate(NAMES):
            moved = change if first or block else 0.0
            writer.add(name.removesuffix(".to_q"), x + block, slot="in.hidden_states")
            writer.add(name, x + block, slot="in.0")
            writer.add(name, 2 * x + block + moved, dtype=dtype)
    return folder


@pytest.fixture
def same(tmp_path: Path) -> scoring.SameArrays:
    return scoring.SameArrays(write(tmp_path / "reference"))


def scored(verdict: FakeVerdict, same: scoring.SameArrays, **truth: Any) -> scoring.Score:
    bug = replace(find_bug("linear-transposed"), **truth)
    return scoring.score("judge", "float32", bug, verdict, same)


@pytest.mark.parametrize(
    ("site", "slot", "right"),
    [
        (NAMES[1], None, "exact"),
        (NAMES[1], "in.0", "block"),
        ("transformer/transformer_blocks.1.ff.net.0", "out", "block"),
        (NAMES[0], "out", "component"),
        ("vae/decoder", "out", ""),
        (None, None, ""),
    ],
)
def test_the_site_decides_the_score(same, site, slot, right: str) -> None:
    score = scored(FakeVerdict(site=site, slot=slot), same)
    levels = [level for level in ("exact", "block", "component") if getattr(score, level)]
    assert levels == {"exact": ["exact", "block", "component"]}.get(
        right, {"block": ["block", "component"], "component": ["component"]}.get(right, [])
    )


def test_a_site_that_holds_the_same_array_is_the_same_site(same) -> None:
    truth = (Site(NAMES[1], "in.0"),)
    outer = NAMES[1].removesuffix(".to_q")
    assert scored(FakeVerdict(site=outer, slot="in.hidden_states"), same, site=truth).exact
    assert not scored(FakeVerdict(site=NAMES[0], slot="in.0"), same, site=truth).exact


def test_a_parameter_of_the_guilty_module_is_the_module(same) -> None:
    assert scored(FakeVerdict(site=f"{NAMES[1]}.weight"), same).exact
    assert not scored(FakeVerdict(site=f"{NAMES[0]}.weight"), same).exact


def test_the_right_site_at_another_step_is_not_exact(same) -> None:
    assert not scored(FakeVerdict(site=NAMES[1], step=1), same).exact
    assert scored(FakeVerdict(site=NAMES[1], step=1), same, step=1).exact


def test_a_site_counts_once_over_steps_and_a_kind_once_over_blocks(same) -> None:
    rows = tuple(Wrong(name, step=step) for step in range(3) for name in NAMES)
    table = Wrong("pipeline/sigmas")  # no row: a gate
    verdict = Rows((*rows, Wrong("vae", wrong=False)), (*rows[:2], table))
    bug, free = find_bug("linear-transposed"), FakeVerdict(site=f"{NAMES[1]}.weight")
    score = scoring.score("judge, injected", "float32", bug, verdict, same, free)
    assert (score.flagged, score.sites, score.kinds, score.confirms) == (7, 3, 2, True)
    other = scoring.score("judge, injected", "float32", bug, verdict, same, FakeVerdict(site="vae"))
    assert not other.confirms


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("transformer/transformer_blocks.12.attn.to_q", "transformer/transformer_blocks.12"),
        ("vae/decoder.up_blocks.1.resnets.0.conv1", "vae/decoder.up_blocks.1"),
        ("vae/decoder.mid_block.resnets.0", "vae/decoder.mid_block"),
        ("text_encoder_3/encoder.block.1.layer.0", "text_encoder_3/encoder.block.1"),
        ("transformer/time_text_embed.text_embedder", "transformer/time_text_embed"),
        ("pipeline/latents", "pipeline/latents"),
        ("transformer", "transformer/"),
    ],
)
def test_blocks(name: str, block: str) -> None:
    assert scoring.block_of(name) == block


@pytest.mark.parametrize("judge", [baselines.fixed_rule, baselines.allclose])
def test_baselines_find_a_gross_error_and_nothing_else(tmp_path: Path, judge) -> None:
    reference, right = write(tmp_path / "reference"), write(tmp_path / "right")
    verdict = judge(reference, write(tmp_path / "wrong", 5.0))
    assert (verdict.verdict, verdict.site, verdict.flagged) == ("diverge", NAMES[1], 1)
    assert judge(reference, right).verdict == "agree"
    assert judge(reference, right).compared == 6


def test_allclose_is_wider_in_half_precision(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference")
    close = write(tmp_path / "f32", 5e-3)
    half = write(tmp_path / "bf16", 5e-3, dtype="bf16")
    assert baselines.allclose(reference, close).verdict == "diverge"
    assert baselines.allclose(reference, half).verdict == "agree"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((2, 8, 4, 6), (2, 4, 6, 8)),  # channels first to last
        ((2, 8, 24), (2, 4, 6, 8)),  # and the picture flattened
        ((1, 96, 32), (1, 1, 96, 32)),
        ((2, 64), (1, 64)),  # rows alike, computed once
    ],
)
def test_baselines_are_helped_with_axes(theirs, ours) -> None:
    found = baselines.aligned(np.zeros(theirs), np.zeros(ours))
    assert found is not None and found.shape == ours


def test_an_input_of_another_size_is_left_out() -> None:
    assert baselines.aligned(np.zeros((2, 64)), np.zeros((2, 2, 64))) is None


def test_run_scores_every_case_before_every_judge_and_sums_up(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference")
    cases = [None, controls()[0], find_bug("linear-transposed"), find_bug("max-period")]
    gone: list[Path] = []

    def port(case: scoring.Case, dtype: str) -> Path:
        wrong = 5.0 if case is cases[2] else 0.0
        return write(tmp_path / f"{dtype}-{case.id if case else 'clean'}", wrong)

    scores = list(
        scoring.run(
            cases,
            dtypes=["float32"],
            judges={"a": baselines.allclose, "loud": lambda *_: FakeVerdict(site=NAMES[0])},
            reference=lambda dtype, part: (reference, reference),
            port=port,
            done=gone.append,
        )
    )
    assert len(scores) == 8 and len(gone) == 4
    dev, held_out, loud, _ = scoring.summarize(scores)
    assert (dev.judge, dev.bugs, dev.exact, dev.flagged, dev.false_alarms) == ("a", 1, 1, 1, 0)
    assert (held_out.part, held_out.bugs, held_out.exact) == ("held-out", 1, 0)
    assert (loud.exact, loud.component, loud.false_alarms, loud.clean_flagged) == (0, 1, 2, 3)
