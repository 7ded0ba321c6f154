"""On the reference's values one bug is one wrong place, in live MLX modules.

The reference is our own port before the bug: injection is tested here, not the port.
"""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from lydite.diff.divergence.write_injection import isolate
from lydite.diff.result import Verdict
from lydite.pipelines.pipeline import Pipeline
from lydite.trace.reader import Trace
from lydite.trace.taps import injection
from seeded_bugs.cases import Control, controls, find_bug
from seeded_bugs.recording import record_port

GUILTY = {
    "linear-transposed": ["transformer/transformer_blocks.1.attn.to_q"],
    "gelu-quick-for-erf": ["text_encoder_2/text_model.encoder.layers.0.mlp.fc2 [in.0]"],
    # between modules: the block's residual sum carries it on
    "gate-missing": ["transformer/transformer_blocks.1.norm2 [in.0]"],
    # in the sampler, which goes on from its own array
    "prediction-sign": ["pipeline/latents"],
    # in a table, before any module runs
    "shift-missing": ["pipeline/sigmas"],
}


@pytest.fixture(scope="module")
def reference(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_port(pipeline, tmp_path_factory.mktemp("reference") / "trace")


def alone(pipeline: Pipeline, reference: Path, case, folder: Path) -> Verdict:
    dump = case.dump if isinstance(case, Control) else None

    def run(out: Path, values: Path | None = None) -> None:
        source = injection(values, "*:*") if values else None
        with case.apply(pipeline) if case else nullcontext():
            record_port(pipeline, out, dump=dump, inject=source)

    run(folder / "port")
    with Trace.open(reference) as theirs, Trace.open(folder / "port") as ours:
        return isolate(theirs, ours, lambda values, out: run(out, values), folder)


@pytest.mark.parametrize("id", GUILTY)
def test_a_bug_is_one_wrong_place(pipeline, reference: Path, id: str, tmp_path: Path) -> None:
    found = alone(pipeline, reference, find_bug(id), tmp_path)
    assert found.verdict == "diverge"
    assert [row.name for row in found.sources] == GUILTY[id]


@pytest.mark.parametrize("id", ["attention-written-out", "euler-as-a-mean", "dump-channels-first"])
def test_another_way_to_the_same_is_none(pipeline, reference: Path, id: str, tmp_path) -> None:
    (control,) = (control for control in controls() if control.id == id)
    found = alone(pipeline, reference, control, tmp_path)
    assert (found.verdict, found.sources) == ("agree", ())


def test_the_sampler_goes_on_from_what_it_is_given(pipeline, reference: Path, tmp_path) -> None:
    with find_bug("prediction-sign").apply(pipeline):
        record_port(pipeline, tmp_path / "port", inject=injection(reference, "pipeline/latents"))
    with Trace.open(reference) as theirs, Trace.open(tmp_path / "port") as ours:
        for place in (("transformer", "in.hidden_states", 1), ("vae/decode", "in.0", 0)):
            events = theirs.find(*place), ours.find(*place)
            assert events[0] and events[1]
            assert np.array_equal(theirs.read(events[0]), ours.read(events[1]))
