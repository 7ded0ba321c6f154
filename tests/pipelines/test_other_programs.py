"""Quantized models that mflux and DiffusionKit saved: audited, and drawn as from our own folder."""

from pathlib import Path

import numpy as np
import pytest

from lydite.core.errors import FileError
from lydite.core.request import Request
from lydite.core.tensorfile import save
from lydite.pipelines.audits import audit_model
from lydite.pipelines.pipeline import Pipeline
from lydite.weights.quantized_format import Format
from support.other_programs import MAKERS, make_pair
from support.tiny_sd3 import read_tensors


def drawn(model: Path, components: Path | None = None) -> object:
    pipeline = Pipeline.open(model, components=components)
    request = Request("a red fox", width=64, height=64, steps=2)
    (picture,) = pipeline.generate(request, [1])
    return picture.pixels


@pytest.mark.parametrize("kind", MAKERS)
def test_a_picture_is_that_of_our_own_folder(kind: str, tmp_path: Path) -> None:
    theirs, own = make_pair(kind, tmp_path)
    ledgers = audit_model(theirs)
    assert all(ledger.clean for ledger in ledgers.values()), ledgers
    components = own if theirs.is_file() else None
    pipeline = Pipeline.open(theirs, components=components)
    formats = pipeline.model.components["transformer"].formats
    assert set(formats.values()) <= {Format(4), Format(8)} and len(formats) > 20
    np.testing.assert_array_equal(drawn(theirs, components), drawn(own))


def test_what_is_wrong_is_said_in_the_programs_own_names(tmp_path: Path) -> None:
    theirs, _ = make_pair("diffusionkit/sd3", tmp_path)
    tensors = read_tensors(theirs)
    lost = "model.diffusion_model.context_embedder.biases"
    extra = "model.diffusion_model.multimodal_transformer_blocks.0.image_transformer_block.x.weight"
    tensors[extra] = tensors.pop(lost)
    save(tmp_path / "damaged.safetensors", tensors)
    ledger = audit_model(tmp_path / "damaged.safetensors")["transformer"]
    assert [finding.tensor for finding in ledger.missing] == [lost]
    assert [finding.tensor for finding in ledger.unexpected] == [extra]


def test_a_folder_that_belongs_to_no_network_is_named(tmp_path: Path) -> None:
    theirs, _ = make_pair("mflux/z_image", tmp_path)
    (theirs / "controlnet").mkdir()
    save(theirs / "controlnet" / "0.safetensors", {"a": np.zeros(2)})
    ledger = audit_model(theirs)["outside every network"]
    assert ledger.clean and [row.tensor for row in ledger.undecidable] == ["controlnet/"]


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    save(tmp_path / "transformer" / "0.safetensors", {"layers.0.weight": np.zeros((2, 2))})
    with pytest.raises(FileError, match="nor tensor names of FLUX"):
        audit_model(tmp_path)
    with pytest.raises(FileError, match="or tensor names of FLUX"):
        Pipeline.open(tmp_path)
