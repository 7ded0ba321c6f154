"""The data of the families: defaults as in diffusers' calls, and what each of them takes."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from lydite.core.errors import ConfigError
from lydite.core.request import Request
from lydite.pipelines.families import flux, flux2
from lydite.pipelines.family import BUILT_IN, Defaults, families, find_family, network_classes
from lydite.pipelines.planning import _guidance_scales
from lydite.reference.family import BUILT_IN as REFERENCES
from lydite.reference.family import find_reference_family

FAMILIES = {family.name: family for family in families()}
# As in the signatures of diffusers 0.42.1's calls: num_inference_steps, guidance_scale (of
# Qwen-Image true_cfg_scale), max_sequence_length; strength of img2img, and of inpainting.
CALLS: dict[str, tuple[Defaults, tuple[int, float, int | None], float | None, float | None]] = {
    "sd": (FAMILIES["sd"].defaults, (50, 7.5, None), 0.8, 1.0),
    "sdxl": (FAMILIES["sdxl"].defaults, (50, 5.0, None), 0.3, 0.9999),
    "sd3": (FAMILIES["sd3"].defaults, (28, 7.0, 256), 0.6, None),
    "flux dev": (flux.DEV.defaults, (28, 3.5, 512), 0.6, None),
    "flux fill": (flux.FILL.defaults, (50, 30.0, 512), None, 1.0),
    "flux2 base": (flux2.BASE.defaults, (50, 4.0, 512), None, None),
    "qwen_image": (FAMILIES["qwen_image"].defaults, (50, 4.0, 512), 0.6, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_defaults_are_those_of_the_reference(name: str) -> None:
    defaults, call, strength, mask_strength = CALLS[name]
    assert (defaults.steps, defaults.guidance, defaults.text_length) == call
    assert strength in (None, defaults.strength)
    assert mask_strength in (None, defaults.mask_strength)


# guidance, image, and of: inpaints, skips layers, weighs prompts, refines, textual inversion
ABILITIES = {
    "sd3": ("cfg", "start", ()),
    "flux": ("distilled", "start", ("inpaints",)),
    "flux2": ("cfg", "reference", ()),
    "qwen_image": ("negative", "start", ("inpaints",)),
    "z_image": ("above_0", "start", ("inpaints",)),
    "sdxl": (
        "cfg",
        "start",
        ("inpaints", "skips_layers", "weighs_prompts", "refines", "embeddings"),
    ),
    "sd": ("cfg", "start", ("inpaints", "skips_layers", "weighs_prompts", "embeddings")),
}
FLAGS = ("inpaints", "skips_layers", "weighs_prompts", "refines", "embeddings")


def test_what_each_family_takes() -> None:
    found = {
        name: (each.guidance, each.image, tuple(flag for flag in FLAGS if getattr(each, flag)))
        for name, each in FAMILIES.items()
    }
    assert {name: found[name] for name in ABILITIES} == ABILITIES
    assert set(BUILT_IN) == set(REFERENCES) == set(ABILITIES)


@pytest.mark.parity
@pytest.mark.parametrize("name", ABILITIES)
def test_classes_are_known_to_the_reference(name: str) -> None:
    known = {*dir(pytest.importorskip("diffusers")), *dir(pytest.importorskip("transformers"))}
    family = FAMILIES[name]  # hasattr would import each class
    for class_name in family.pipelines:
        assert class_name in known
        assert find_family(class_name, "model_index.json") is family
        assert network_classes(class_name) is family.kinds
    for part, classes in family.classes.items():
        assert set(classes) <= set(family.kinds), part
        assert set(classes) <= known
    assert {family.network, "vae"} <= set(family.required) <= {*family.classes, *family.encoders}
    assert set(family.tokenizers) == set(family.encoders)
    assert find_reference_family(name).name == name


@pytest.mark.parametrize("name", ABILITIES)
def test_the_negative_prompt_is_run_where_the_reference_runs_it(name: str) -> None:
    pipeline: Any = SimpleNamespace(family=FAMILIES[name])
    reference = find_reference_family(name)
    for scale, negative, true in product((0, 0.5, 1, 1.01, 4), ("", "snow"), (None, 1, 4)):
        request = Request("a", negative, guidance=scale, true_guidance=true)
        found, _ = _guidance_scales(pipeline, request)
        assert reference.is_guided(request) == (found > 1), request
        again, scales = _guidance_scales(pipeline, request.replace(guidance_steps=(scale,) * 2))
        assert again == found and set(scales) <= {found}


EIGHT = {"latent_channels": 16, "factor": 8}
# Configs as published -> channels, multiple of the sides, default side, largest, pixels of the VAE
SIZES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "sd": ({"unet": {"sample_size": 64}, "vae": EIGHT}, (16, 8, 512, None, 8)),
    "sd without a size": ({"unet": {"sample_size": None}, "vae": EIGHT}, (16, 8, 512, None, 8)),
    "sdxl": ({"unet": {"sample_size": 128}, "vae": EIGHT}, (16, 8, 1024, None, 8)),
    "sd3": (
        {
            "transformer": {"sample_size": 128, "patch_size": 2, "pos_embed_max_size": 192},
            "vae": EIGHT,
        },
        (16, 16, 1024, 3072, 8),
    ),
    "flux": ({"vae": EIGHT}, (16, 16, 1024, None, 8)),
    "flux2": ({"vae": EIGHT}, (64, 16, 1024, None, 8)),
    "qwen_image": ({"vae": EIGHT}, (16, 16, 1024, None, 8)),
    "z_image": (
        {"transformer": {"axes_lens": (1536, 512, 512)}, "vae": EIGHT},
        (16, 16, 1024, 8192, 8),
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_pictures_follow_from_published_configs(name: str) -> None:
    parts, (channels, multiple, default, largest, factor) = SIZES[name]
    configs = {part: SimpleNamespace(**config) for part, config in parts.items()}
    model: Any = SimpleNamespace(config=lambda part: configs[part])
    space = FAMILIES[name.split()[0]].latents(model)
    assert (space.channels, space.multiple, space.largest) == (channels, multiple, largest)
    assert space.default == (default, default) and space.vae_factor == factor
    width, height = 4 * multiple, 2 * multiple
    assert space.shape(width, height) == (channels, height // space.factor, width // space.factor)
    patches = (height // multiple) * (width // multiple)
    assert space.tokens(width, height) == patches == 8


def test_a_class_of_no_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"x: the pipeline class is 'Y'; supported are .*Stable Diffusion"
    ):
        find_family("Y", "x")
    with pytest.raises(ConfigError, match="the pipeline class is None"):
        find_family(None, "x")
    every = network_classes("Y")
    assert all(set(family.kinds) <= set(every) for family in FAMILIES.values())
