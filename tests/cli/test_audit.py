"""`lydite audit`: 0 clean, 1 wrong, 2 unreadable; one line or one report, never a traceback."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lydite.cli.audit import _audit_lora, _print_undecidable, _ranks
from lydite.cli.main import main
from lydite.core.tensorfile import save
from lydite.weights.audit import TRANSPOSABLE, Finding
from support.tiny_sd3 import read_tensors

Run = Callable[..., tuple[int, str, str]]
BIAS = "transformer_blocks.0.attn.to_q.bias"
SQUARE = "transformer_blocks.0.attn.to_q.weight"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, stdout and stderr of a `lydite` command, in this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lydite", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def transformer(untrained: Path, tmp_path: Path) -> Path:
    """One component's folder that a test may damage."""
    shutil.copytree(untrained / "transformer", tmp_path / "transformer")
    return tmp_path / "transformer"


def damage(folder: Path, **changes: Any) -> Path:
    """Tensors replaced, added or, with None, taken away."""
    (path,) = folder.glob("*.safetensors")
    tensors = {**read_tensors(path), **{name.replace("/", "."): x for name, x in changes.items()}}
    save(path, {name: x for name, x in tensors.items() if x is not None})
    return folder


def test_a_sound_pipeline_is_clean(run: Run, untrained: Path) -> None:
    status, out, err = run("audit", untrained)
    assert status == 0 and not err and out.startswith("clean: ")
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        assert f"{name}: " in out
    assert "0 wrong" in out and out.count("cannot be checked for transposition") == 4


@pytest.mark.parametrize("part", ["scheduler", "tokenizer_2"])
def test_a_part_without_tensors_that_is_missing_is_noted(
    run: Run, untrained: Path, tmp_path: Path, part: str
) -> None:
    assert "cannot be run" not in run("audit", untrained)[1]
    shutil.copytree(untrained, tmp_path / "model", ignore=lambda *_: [part])
    status, out, _ = run("audit", tmp_path / "model")
    assert status == 0 and part in out.split("but the model cannot be run")[1]


def test_every_form_of_a_component(run: Run, transformer: Path) -> None:
    (file,) = transformer.glob("*.safetensors")
    for path in (transformer, file):
        status, out, _ = run("audit", path)
        assert status == 0 and out.splitlines()[1].startswith("transformer: ")


def test_each_fault_is_in_its_bin_and_exit_1(run: Run, transformer: Path) -> None:
    poisoned = np.ones(128, np.float32)
    poisoned[5] = np.nan
    damage(
        transformer,
        **{
            BIAS: None,
            "stray": np.zeros(3, np.float32),
            "proj_out.bias": np.zeros((64, 1), np.float32),
            "context_embedder.bias": np.zeros(128, np.int32),
            "pos_embed.proj.bias": poisoned,
        },
    )
    status, out, err = run("audit", transformer)
    assert status == 1 and not err and out.startswith("not clean: ")
    for text in (
        f"missing: the model needs it, the file lacks it (1)\n    {BIAS}: needed for",
        "unexpected: in the file, not in the model (1)\n    stray: the model has no stray",
        "wrong shape (1)\n    proj_out.bias: model expects (64,), file has (64, 1)",
        "wrong dtype (1)\n    context_embedder.bias: stored as I32",
        "NaN or Inf (1)\n    pos_embed.proj.bias: 1 NaN and 0 Inf of 128 values",
    ):
        assert text in out
    status, out, _ = run("audit", transformer, "--json")
    report = json.loads(out)
    assert status == 1 and report["clean"] is False
    bins = report["components"]["transformer"]
    assert [row["tensor"] for row in bins["missing"]] == [BIAS]
    assert [row["tensor"] for row in bins["not_finite"]] == ["pos_embed.proj.bias"]


def test_what_is_wrong_comes_before_the_notes_of_sound_networks(
    run: Run, untrained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(untrained, folder)
    names = [line.split(":")[0] for line in run("audit", folder)[1].splitlines() if line[0] != " "]
    damage(folder / names[-1], **{name_of_last(folder / names[-1]): None})
    status, out, _ = run("audit", folder)
    assert status == 1
    lines = out.splitlines()
    assert lines[1].startswith(f"{names[-1]}: ") and "missing" in lines[2]


def name_of_last(folder: Path) -> str:
    (path,) = folder.glob("*.safetensors")
    return max(read_tensors(path))


def test_json_is_one_object(run: Run, untrained: Path) -> None:
    status, out, _ = run("audit", untrained, "--json")
    report = json.loads(out)
    assert status == 0 and report["clean"] is True and report["model"] == str(untrained)
    for name, bins in report["components"].items():
        count = len(read_tensors(untrained / name))
        assert bins["clean"] and len(bins["loaded"]) == count


def test_long_bins_are_cut_without_all(run: Run, transformer: Path) -> None:
    damage(transformer, **{f"stray.{index}": np.zeros(1) for index in range(15)})
    out = run("audit", transformer)[1]
    assert out.count("stray.") == 20 and "… and 5 more (--all)" in out
    assert run("audit", transformer, "--all")[1].count("stray.") == 30


def test_a_transposed_square_with_a_second_checkpoint_or_its_digests(
    run: Run, untrained: Path, transformer: Path, tmp_path: Path
) -> None:
    digests = tmp_path / "digests.json"
    assert run("audit", untrained, "--digests", digests)[0] == 0
    damage(transformer, **{SQUARE: read_tensors(transformer)[SQUARE].T.copy()})
    status, out, _ = run("audit", transformer, "--all")
    assert status == 0 and f"    {SQUARE}: square" in out
    for reference in (untrained, untrained / "transformer", digests):
        status, out, _ = run("audit", transformer, "--against", reference)
        assert status == 1 and f"    {SQUARE}: transposed: " in out


def test_digests_of_a_damaged_checkpoint_are_not_written(
    run: Run, transformer: Path, tmp_path: Path
) -> None:
    damage(transformer, stray=np.zeros(3))
    status, _, err = run("audit", transformer, "--digests", tmp_path / "digests.json")
    assert status == 1 and "was not written" in err
    assert not (tmp_path / "digests.json").exists()


def test_headers_only(run: Run, transformer: Path) -> None:
    damage(transformer, **{BIAS: np.full(128, np.inf, np.float32)})
    assert run("audit", transformer)[0] == 1
    assert run("audit", transformer, "--headers-only")[0] == 0


def test_odd_values_are_noted_and_pass(run: Run, transformer: Path) -> None:
    damage(transformer, **{SQUARE: np.zeros((128, 128), np.float32)})
    status, out, _ = run("audit", transformer)
    assert status == 0 and f"note: odd values (1)\n    {SQUARE}: all zero" in out


def single_file(path: Path, untrained: Path) -> Path:
    """CLIP-G and a scale under the names of SD3's single file."""
    tensors = read_tensors(untrained / "text_encoder_2")
    named = {f"text_encoders.clip_g.transformer.{name}": x for name, x in tensors.items()}
    save(path, {**named, "text_encoders.clip_g.logit_scale": np.array(4.6)})
    return path


def test_a_single_file(run: Run, untrained: Path, tmp_path: Path) -> None:
    path = single_file(tmp_path / "sd3.safetensors", untrained)
    status, out, _ = run("audit", path)
    assert status == 0 and "text_encoder_2: 37 loaded" in out
    assert "outside every network: 0 loaded, 1 dropped on purpose, 0 wrong" in out
    status, out, _ = run("audit", path, "--against", untrained)
    assert status == 0 and "cannot be checked" not in out
    save(path, {**read_tensors(path), "first_stage_model.encoder.down.0.x": np.zeros(3)})
    assert run("audit", path)[0] == 1


def unreadable(folder: Path, untrained: Path) -> dict[str, Path]:
    """What cannot be audited, by why."""
    (folder / "garbage.safetensors").write_bytes(b"\xff" * 4096)
    (folder / "notes.txt").write_text("a fox in the snow")
    for name in ("empty", "pickles", "unknown", "no config", "odd", "broken"):
        (folder / name).mkdir()
    (folder / "pickles" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    shutil.copy(untrained / "vae" / "config.json", folder / "pickles")
    save(folder / "unknown" / "model.safetensors", {"x": np.zeros(3)})
    (folder / "unknown" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save(folder / "no config" / "model.safetensors", {"x": np.zeros(3)})
    (folder / "odd" / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DModel"]}')
    (folder / "broken" / "config.json").write_text("{")
    sd1 = ("model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.encoder.down.0.x")
    save(folder / "sd1.safetensors", dict.fromkeys(sd1, np.zeros(3)))
    save(folder / "wan.safetensors", {"blocks.0.self_attn.norm_q.weight": np.zeros(3)})
    names = ("garbage.safetensors", "notes.txt", "empty", "pickles", "unknown", "no config", "odd")
    found = {
        name: folder / name for name in (*names, "broken", "sd1.safetensors", "wan.safetensors")
    }
    lonely = folder / "no config" / "model.safetensors"
    return {**found, "lonely": lonely, "missing": folder / "nowhere" / "x.safetensors"}


def test_what_cannot_be_audited_is_one_line_and_exit_2(
    run: Run, untrained: Path, tmp_path: Path
) -> None:
    for what, path in unreadable(tmp_path, untrained).items():
        for options in ([], ["--json"]):
            status, out, err = run("audit", path, *options)
            assert (status, out) == (2, ""), (what, out, err)
            assert err.startswith("error: ") and err.count("\n") == 1 and str(path) in err, what


def test_a_config_that_does_not_fit_its_weights_is_wrong_not_unreadable(
    run: Run, transformer: Path
) -> None:
    config = json.loads((transformer / "config.json").read_text())
    (transformer / "config.json").write_text(json.dumps({**config, "num_layers": 3}))
    status, out, _ = run("audit", transformer, "--all")
    assert status == 1 and "transformer_blocks.3.attn.to_q.bias: the model has no" in out


@pytest.mark.parametrize(
    ("key", "value"), [("num_layers", 10**9), ("num_layers", -1), ("patch_size", None), ("new", 1)]
)
def test_a_hostile_config_is_one_line(run: Run, transformer: Path, key: str, value: Any) -> None:
    config = json.loads((transformer / "config.json").read_text())
    (transformer / "config.json").write_text(json.dumps({**config, key: value}))
    status, out, err = run("audit", transformer)
    assert (status, out) == (2, "") and key in err and err.count("\n") == 1


def test_a_reference_that_cannot_be_used(run: Run, untrained: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"vae": {"x": 1}}')
    for reference in ("bad.json", "none.json", "none.safetensors"):
        status, out, err = run("audit", untrained / "vae", "--against", tmp_path / reference)
        assert (status, out) == (2, "") and reference in err and err.count("\n") == 1


def test_from_a_shell(untrained: Path, transformer: Path) -> None:
    command = [sys.executable, "-m", "lydite", "audit"]
    done = subprocess.run([*command, untrained / "vae", "--json"], capture_output=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["clean"] is True
    damage(transformer, stray=np.zeros(3))
    done = subprocess.run([*command, transformer], capture_output=True, check=False)
    assert done.returncode == 1 and b"stray" in done.stdout and not done.stderr
    done = subprocess.run([*command, transformer / "none"], capture_output=True, check=False)
    assert done.returncode == 2 and b"Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("ranks", "text"), [((4,), "rank 4"), ((4, 4), "rank 4"), ((8, 2, 4), "ranks 2 to 8")]
)
def test_the_ranks_of_a_lora(ranks: tuple[int, ...], text: str) -> None:
    layers = [SimpleNamespace(down=np.zeros((rank, 9))) for rank in ranks]
    assert _ranks(cast(Any, SimpleNamespace(layers=layers))) == text


def test_what_cannot_be_decided_is_counted_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = (
        *(Finding(f"a.{n}", TRANSPOSABLE) for n in range(2)),
        *(Finding(f"b.{n}", "in 4 bits") for n in range(3)),
        Finding("c", "in 8 bits"),
    )
    ledger = cast(Any, SimpleNamespace(undecidable=found))
    _print_undecidable(ledger, 10)
    assert capsys.readouterr().out.splitlines() == [
        "  2 square tensors cannot be checked for transposition; --against a copy decides",
        "  not compared: in 4 bits (3 tensors)",
        "  not compared: in 8 bits (1 tensor)",
    ]
    _print_undecidable(ledger, None)
    assert capsys.readouterr().out.startswith("  not decidable (6)\n    a.0: ")


def test_a_lora_for_scripts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [
        SimpleNamespace(network=SimpleNamespace(name=name), down=np.zeros((4, 2)))
        for name in ("transformer", "transformer", "text_encoder")
    ]
    family = SimpleNamespace(lora_networks=lambda components: components)
    opened = family, SimpleNamespace(components={}), None
    monkeypatch.setattr("lydite.pipelines.model_files.locate", Path)
    monkeypatch.setattr("lydite.pipelines.model_files.open_model", lambda _: opened)
    monkeypatch.setattr("lydite.weights.lora.read_lora", lambda *_: SimpleNamespace(layers=layers))
    _audit_lora("l.safetensors", "base", True)
    counts = {"transformer": 2, "text_encoder": 1}
    told = json.loads(capsys.readouterr().out)
    assert told == {"model": "l.safetensors", "clean": True, "layers": counts}
    _audit_lora("l.safetensors", "base", False)
    assert "it changes 2 of transformer, 1 of text_encoder (rank 4)" in capsys.readouterr().out
