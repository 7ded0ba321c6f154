"""How files of LoRAs name a layer; networks of one weight, without the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import WeightsError
from lydite.core.tensorfile import save
from lydite.weights.lora import Network, changes, read_lora

SHAPE = (4, 3)
DOTTED = ("diffusion_model.", "model.diffusion_model.", "base_model.model.", "")
# Network -> what stands before a dotted name, and before one in kohya's style
PREFIXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unet": (("unet.", *DOTTED), ("lora_unet_",)),
    "transformer": (("transformer.", *DOTTED), ("lora_unet_", "lora_transformer_")),
    "text_encoder": (("text_encoder.",), ("lora_te_", "lora_te1_")),
    "text_encoder_2": (("text_encoder_2.",), ("lora_te2_",)),
    "text_encoder_3": (("text_encoder_3.",), ("lora_te3_",)),
}
ENDINGS = {  # of down and of up
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    ("_lora.down.weight", "_lora.up.weight"),
}
DOWN, UP = np.ones((2, 3), np.float32), np.ones((4, 2), np.float32)


def network(name: str, module: str = "blocks.0.to_q") -> Network:
    return Network(name, {f"{module}.weight": SHAPE, "norm.weight": (4,)}, [()])


def changed(path: Path, *networks: Network) -> dict[str, float]:
    """The change of each weight, which has one value everywhere."""
    lora = read_lora(path, networks)
    return {
        name: float(change.mean())
        for each in networks
        for name, change in changes([(lora, 1.0)], each.name)
    }


@pytest.mark.parametrize("name", PREFIXES)
def test_every_prefix_finds_its_network(name: str, tmp_path: Path) -> None:
    dotted, kohya = PREFIXES[name]
    stems = [f"{p}blocks.0.to_q" for p in dotted] + [f"{p}blocks_0_to_q" for p in kohya]
    for stem in stems:
        path = tmp_path / "lora.safetensors"
        save(path, {f"{stem}.lora_down.weight": DOWN, f"{stem}.lora_up.weight": UP})
        assert changed(path, network(name)) == {"blocks.0.to_q.weight": 2.0}, stem
        others = [other for other in PREFIXES if stem not in _names(other)]
        with pytest.raises(WeightsError, match="2 of 2 tensors have no place"):
            read_lora(path, [network(other) for other in others])


def _names(network: str) -> set[str]:
    dotted, kohya = PREFIXES[network]
    return {f"{p}blocks.0.to_q" for p in dotted} | {f"{p}blocks_0_to_q" for p in kohya}


@pytest.mark.parametrize("ending", sorted(ENDINGS))
def test_every_ending_says_which_factor_it_is(ending: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    down, up = (f"unet.blocks.0.to_q{each}" for each in ending)
    save(path, {down: DOWN, up: UP})
    assert changed(path, network("unet")) == {"blocks.0.to_q.weight": 2.0}


@pytest.mark.parametrize(
    ("stored", "module"),
    [
        ("blocks.0.processor.to_q", "blocks.0.to_q"),
        ("blocks.0.attn.processor.to_out", "blocks.0.attn.to_out.0"),
        ("layers.0.self_attn.to_q", "layers.0.self_attn.q_proj"),
        ("layers.0.self_attn.to_k", "layers.0.self_attn.k_proj"),
        ("layers.0.self_attn.to_v", "layers.0.self_attn.v_proj"),
        ("layers.0.self_attn.to_out", "layers.0.self_attn.out_proj"),
        ("layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj"),
    ],
)
def test_names_from_before_diffusers_022(stored: str, module: str, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save(path, {f"unet.{stored}_lora.down.weight": DOWN, f"unet.{stored}_lora.up.weight": UP})
    assert changed(path, network("unet", module)) == {f"{module}.weight": 2.0}


@pytest.mark.parametrize(
    ("metadata", "alpha", "scale"),
    [
        ("{}", None, 1.0),
        ("{}", 4.0, 2.0),
        ("{}", 0.0, 0.0),  # switched off
        ('{"unet.lora_alpha": 6}', 0.0, 0.0),
        ('{"unet.lora_alpha": 0}', None, 0.0),
        ('{"unet.lora_alpha": 6, "unet.alpha_pattern": {"to_q": 0}}', None, 0.0),
        ('{"unet.lora_alpha": 6, "unet.r": 2, "unet.use_dora": false}', None, 3.0),
        ('{"unet.lora_alpha": 6}', 4.0, 2.0),  # the tensor goes first
        ('{"unet.lora_alpha": 6, "unet.use_rslora": true}', None, 6 / 2**0.5),
        ('{"unet.use_rslora": true}', 4.0, 4 / 2**0.5),
        ('{"unet.use_rslora": true}', None, 1.0),
        ('{"text_encoder.lora_alpha": 6}', None, 1.0),
        ('{"unet.lora_alpha": 6, "unet.alpha_pattern": {"to_q": 8}}', None, 4.0),
        ('{"unet.lora_alpha": 6, "unet.alpha_pattern": {"o_q": 8}}', None, 3.0),
        ('{"unet.lora_alpha": 6, "unet.alpha_pattern": {"^to_q": 8}}', None, 3.0),
        ('{"unet.lora_alpha": 6, "unet.alpha_pattern": {"^blocks.0.to_q$": 8}}', None, 4.0),
        ('{"unet.alpha_pattern": {"to_k": 2, "0.to_q": 8, "to_q": 1}}', None, 4.0),
    ],
)
def test_alpha_over_the_rank(
    metadata: str, alpha: float | None, scale: float, tmp_path: Path
) -> None:
    path, stem = tmp_path / "lora.safetensors", "unet.blocks.0.to_q"
    tensors: dict[str, Any] = {f"{stem}.lora_A.weight": DOWN, f"{stem}.lora_B.weight": UP}
    if alpha is not None:
        tensors[f"{stem}.alpha"] = np.array(alpha, np.float32)
    save(path, tensors, {"lora_adapter_metadata": metadata})
    (layer,) = read_lora(path, [network("unet")]).layers
    assert layer.scale == pytest.approx(scale)
    assert layer.change().max() == pytest.approx(2 * scale)


def test_dora_is_refused_by_its_setting(tmp_path: Path) -> None:
    path, stem = tmp_path / "lora.safetensors", "unet.blocks.0.to_q"
    tensors = {f"{stem}.lora_A.weight": DOWN, f"{stem}.lora_B.weight": UP}
    save(path, tensors, {"lora_adapter_metadata": '{"unet.use_dora": true}'})
    with pytest.raises(WeightsError, match="is of DoRA, which is not supported"):
        read_lora(path, [network("unet")])
