"""The whole road on toy sizes, in seconds and without the reference: what the commit hook runs."""

from pathlib import Path

from lydite.core.request import Request
from lydite.pipelines.audits import audit_model
from lydite.pipelines.pipeline import Pipeline


def test_a_checkpoint_is_audited_loaded_and_drawn_with(untrained: Path) -> None:
    assert all(ledger.clean for ledger in audit_model(untrained).values())
    pipeline = Pipeline.open(untrained)
    request = Request("a red fox", steps=2, width=32, height=32, text_length=4)
    pictures = list(pipeline.generate(request, [0, 1], batch=2))
    assert [picture.pixels.shape for picture in pictures] == [(32, 32, 3)] * 2
    assert all(picture.pixels.std() > 10 for picture in pictures)
