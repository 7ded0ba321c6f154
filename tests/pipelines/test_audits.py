"""A whole checkpoint audited: in any precision, against a second one, against its digests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.core.errors import FileError, WeightsError
from lydite.core.tensorfile import save
from lydite.pipelines.audits import audit_model, write_digests
from lydite.weights.audit import Ledger
from support.tiny_sd3 import read_tensors

HALF = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
SQUARE = "transformer_blocks.1.attn.to_q.weight"
Change = Callable[[str, Any], Any]


def changed(folder: Path, copy: Path, change: Change) -> Path:
    """A copy of a pipeline whose every tensor went through `change`."""
    shutil.copytree(folder, copy)
    for path in copy.glob("*/*.safetensors"):
        save(path, {name: change(name, x) for name, x in read_tensors(path).items()})
    return copy


def clean(ledgers: dict[str, Ledger]) -> bool:
    return all(ledger.clean for ledger in ledgers.values())


def transposed(name: str, x: Any) -> Any:
    return x.T.copy() if name == SQUARE else x


@pytest.fixture(scope="module")
def copies(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in other precisions, and once with a square matrix transposed."""
    folder = tmp_path_factory.mktemp("copies")

    def mixed(name: str, x: Any) -> Any:
        return x.astype([np.float32, np.float16, ml_dtypes.bfloat16][len(name) % 3])

    changes: dict[str, Change] = {
        "F16": lambda _, x: x.astype(HALF["F16"]),
        "BF16": lambda _, x: x.astype(HALF["BF16"]),
        "mixed": mixed,
        "transposed": transposed,
        "transposed F16": lambda name, x: transposed(name, x).astype(np.float16),
    }
    made = {each: changed(untrained, folder / each, change) for each, change in changes.items()}
    return {"F32": untrained, **made}


@pytest.fixture(scope="module")
def digests(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digests") / "sd3.json"
    write_digests(untrained, path)
    return path


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "mixed"])
def test_the_same_model_in_any_precision_is_clean(
    copies: dict[str, Path], digests: Path, name: str
) -> None:
    assert clean(audit_model(copies[name]))
    for reference in (copies["F32"], digests):
        ledgers = audit_model(copies[name], against=str(reference))
        assert clean(ledgers) and not any(ledger.undecidable for ledger in ledgers.values())
    assert clean(audit_model(copies["F32"], against=str(copies[name])))


def test_fp16_and_bf16_are_not_comparable_and_not_called_different(copies: dict[str, Path]) -> None:
    ledgers = audit_model(copies["F16"], against=str(copies["BF16"]))
    assert clean(ledgers)
    for ledger in ledgers.values():
        assert {each.tensor for each in ledger.undecidable} == set(ledger.loaded)
        assert all("not comparable" in each.detail for each in ledger.undecidable)


@pytest.mark.parametrize("name", ["transposed", "transposed F16"])
def test_a_transposed_square_is_undecidable_until_there_is_a_reference(
    copies: dict[str, Path], digests: Path, name: str
) -> None:
    alone = audit_model(copies[name])
    assert clean(alone)
    assert SQUARE in {each.tensor for each in alone["transformer"].undecidable}
    for reference in (str(copies["F32"]), str(digests)):
        ledgers = audit_model(copies[name], against=reference)
        (finding,) = ledgers["transformer"].different
        assert finding.tensor == SQUARE and finding.detail.startswith("transposed: ")
        assert [each for each, ledger in ledgers.items() if not ledger.clean] == ["transformer"]


def test_every_square_transposed_alone_is_found(untrained: Path, tmp_path: Path) -> None:
    """All that the audit lists as undecidable, one network, each in turn."""
    folder = tmp_path / "text_encoder"
    shutil.copytree(untrained / "text_encoder", folder)
    reference = tmp_path / "digests.json"
    write_digests(folder, reference)
    tensors = read_tensors(folder)
    (ledger,) = audit_model(folder, values=False).values()
    squares = {each.tensor for each in ledger.undecidable}
    assert squares == {n for n, x in tensors.items() if x.ndim == 2 and x.shape[0] == x.shape[1]}
    for name in squares:
        save(folder / "model.safetensors", {**tensors, name: tensors[name].T.copy()})
        (ledger,) = audit_model(folder, against=str(reference), values=False).values()
        assert [each.tensor for each in ledger.different] == [name]
        assert "transposed" in ledger.different[0].detail


def test_headers_only_reads_no_values(untrained: Path, tmp_path: Path) -> None:
    def poison(name: str, x: Any) -> Any:
        return np.full_like(x, np.nan) if name == SQUARE else x

    copy = changed(untrained, tmp_path / "copy", poison)
    assert clean(audit_model(copy, values=False))
    (finding,) = audit_model(copy)["transformer"].not_finite
    assert finding.tensor == SQUARE


def test_a_lone_component_is_held_against_the_one_of_its_shape(
    untrained: Path, digests: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "export"
    shutil.copytree(untrained / "vae", copy)
    for reference in (untrained, untrained / "vae", digests):
        (ledger,) = audit_model(copy, against=str(reference)).values()
        assert ledger.clean and not ledger.undecidable


def test_a_network_the_reference_lacks_is_undecidable(untrained: Path) -> None:
    ledgers = audit_model(untrained, against=str(untrained / "vae"))
    assert clean(ledgers) and not ledgers["vae"].undecidable
    assert "no such network" in ledgers["transformer"].undecidable[0].detail


def test_a_reference_of_another_model_is_refused(untrained: Path) -> None:
    with pytest.raises(FileError, match="none of vae"):
        audit_model(untrained / "vae", against=str(untrained / "text_encoder"))


def test_a_damaged_reference_is_no_reference(untrained: Path, tmp_path: Path) -> None:
    copy = changed(untrained, tmp_path / "copy", lambda _, x: x[None])
    with pytest.raises(WeightsError, match="copy"):
        audit_model(untrained, against=str(copy))
    with pytest.raises(WeightsError, match="wrong shape"):
        write_digests(copy, tmp_path / "digests.json")
    assert not (tmp_path / "digests.json").exists()


def test_digests_are_plain_json(digests: Path) -> None:
    rows = json.loads(digests.read_text())
    assert set(rows) == {"transformer", "vae", "text_encoder", "text_encoder_2"}
    row = rows["transformer"][SQUARE]
    assert row["shape"] == [128, 128] and row["dtype"] == "F32" and len(row["float16"]) == 64


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"vae": 3}', '{"vae": {"x": {}}}', '{"vae": {"x": {"shape": [1]}}}', "\x00"],
)
def test_a_json_that_holds_no_digests_is_refused(
    untrained: Path, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "digests.json"
    path.write_text(text)
    with pytest.raises(FileError, match=r"digests\.json"):
        audit_model(untrained / "vae", against=str(path))
    with pytest.raises(FileError, match="no such file"):
        audit_model(untrained / "vae", against=str(tmp_path / "none.json"))


def test_empty_digests_hold_nothing_so_everything_differs(untrained: Path, tmp_path: Path) -> None:
    (tmp_path / "digests.json").write_text('{"vae": {}}')
    (ledger,) = audit_model(untrained / "vae", against=str(tmp_path / "digests.json")).values()
    assert {each.tensor for each in ledger.different} == set(ledger.loaded)


def test_a_shard_index_is_a_checkpoint_not_a_digests_file(untrained: Path, tmp_path: Path) -> None:
    shutil.copy(untrained / "vae" / "config.json", tmp_path)
    tensors = read_tensors(untrained / "vae")
    shard = "diffusion_pytorch_model-00001-of-00001.safetensors"
    save(tmp_path / shard, tensors)
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    (ledger,) = audit_model(untrained / "vae", against=str(index)).values()
    assert ledger.clean and not ledger.undecidable
    (ledger,) = audit_model(index, against=str(untrained / "vae")).values()
    assert ledger.clean and not ledger.undecidable


def test_tensors_outside_every_network_have_their_own_ledger(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    inside = {"model.diffusion_model.joint_blocks.0.x": np.zeros(3)}
    save(path, {**inside, "text_encoders.clip_l.logit_scale": np.zeros(()), "odd": np.zeros(2)})
    rest = audit_model(path)["outside every network"]
    assert [each.tensor for each in rest.dropped] == ["text_encoders.clip_l.logit_scale"]
    assert [each.tensor for each in rest.unexpected] == ["odd"]


@pytest.mark.parametrize("entry", [None, [None, None], "x"])
def test_a_network_that_the_index_omits_is_not_called_clean(
    untrained: Path, tmp_path: Path, entry: object
) -> None:
    folder = Path(shutil.copytree(untrained, tmp_path / "model"))
    index = json.loads((folder / "model_index.json").read_text())
    index["vae"] = entry
    (folder / "model_index.json").write_text(json.dumps(index))
    rest = audit_model(folder)["outside every network"]
    assert [finding.tensor for finding in rest.missing] == ["vae"] and not rest.clean
    assert [finding.tensor for finding in rest.undecidable] == ["vae/"]
    index["_class_name"] = ["x"]
    (folder / "model_index.json").write_text(json.dumps(index))
    rest = audit_model(folder)["outside every network"]
    assert "model_index.json" in [finding.tensor for finding in rest.undecidable]
    assert "outside every network" not in audit_model(untrained)
