"""diffusers as the other side: the same picture, quietly; one clear sentence without it."""

import sys
from typing import Any

import numpy as np
import pytest

from lydite import embedded
from lydite.demo import comparison, sheet
from lydite.demo.settings import Settings
from lydite.demo.studio import Studio
from lydite.reference import diffusers_sd3

OPTIONS: dict[str, Any] = dict(
    seed=0, steps=2, guidance=3.0, width=128, height=128, text_length=16, on_step=lambda: None
)


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr(diffusers_sd3, "NEEDED", ("numpy", "tortch", "difusers"))
    with pytest.raises(diffusers_sd3.ReferenceMissing) as caught:
        diffusers_sd3.draw(embedded.MODEL, "star", **OPTIONS)
    message = str(caught.value)
    assert message.startswith("tortch, difusers are not installed; pip install 'lydite[reference]'")


def test_a_torch_that_does_not_start_is_no_crash(monkeypatch, tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so:\\ncannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(diffusers_sd3, "NEEDED", ())
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(diffusers_sd3.ReferenceMissing, match=r"do not start \(libcudart.so: can"):
        diffusers_sd3.draw(embedded.MODEL, "star", **OPTIONS)


@pytest.mark.parity
def test_the_demo_compares_with_diffusers(tmp_path, capfd) -> None:
    pytest.importorskip("diffusers")
    studio = Studio(
        tmp_path, Settings(prompts=("a large red star above a small blue ring",), steps=4)
    )
    sheet.draw(studio, lambda: None)
    ticks: list[None] = []
    told = comparison.tell(studio, lambda: ticks.append(None))
    assert told.fact and told.fact.value in ("0 / 255", "1 / 255") and told.fact.tone == "good"
    assert len(ticks) == 4 and "16,384 pixels" in told.lines[0]
    names = [tmp_path / name for name in comparison.FILES]
    assert all(path.is_file() for path in names)
    assert capfd.readouterr() == ("", "")  # neither bars nor advice


@pytest.mark.parity
def test_another_seed_is_another_picture() -> None:
    pytest.importorskip("diffusers")
    first, second = (
        diffusers_sd3.draw(embedded.MODEL, "star", **{**OPTIONS, "seed": seed}) for seed in (0, 1)
    )
    assert first.shape == (128, 128, 3) and first.dtype == np.uint8
    assert not np.array_equal(first, second)
