"""Resizing for feature networks against the functions of the tools themselves."""

import warnings
from itertools import pairwise

import numpy as np
import pytest

from lydite.evaluate.resize import RESIZERS, ClipResizer
from support.no_torchvision import import_reference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

SIZES = [(299, 299), (64, 64), (37, 411), (640, 500), (1, 2)]
TOLERANCE = 1e-4  # of -1…1, and of values in units of a standard deviation
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, height, width, 3), np.uint8)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("mode", ["clean", "legacy_pytorch"])
def test_as_clean_fid(mode: str, height: int, width: int) -> None:
    with warnings.catch_warnings():  # clean-fid switches all of them off
        theirs = import_reference("cleanfid.resize").build_resizer(mode)
        expected = np.stack([theirs(picture) for picture in noise(height, width)])
    # Its networks then take (x - 128) / 128 or, as pytorch-fid's, 2·x/255 - 1.
    expected = (expected - 128) / 128 if mode == "clean" else 2 * (expected / 255) - 1
    assert np.abs(RESIZERS[mode](noise(height, width)) - expected).max() < TOLERANCE


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_legacy_tensorflow_as_torch_fidelity(height: int, width: int) -> None:
    module = import_reference("torch_fidelity.interpolate_compat_tensorflow")
    values = torch.from_numpy(noise(height, width)).permute(0, 3, 1, 2).float()
    resized = module.interpolate_bilinear_2d_like_tensorflow1x(
        values, size=(299, 299), align_corners=False
    )
    expected = ((resized - 128) / 128).permute(0, 2, 3, 1).numpy()
    ours = RESIZERS["legacy_tensorflow"](noise(height, width))
    assert np.abs(ours - expected).max() < TOLERANCE


def test_the_three_differ() -> None:
    values = [resize(noise(500, 400)) for resize in RESIZERS.values()]
    assert all(np.abs(a - b).max() > 0.1 for a, b in pairwise(values))


@pytest.mark.parametrize(("height", "width"), [(224, 224), (64, 64), (37, 411), (640, 500)])
def test_clip_as_transformers(height: int, width: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    theirs = CLIPImageProcessorPil()(list(noise(height, width)), return_tensors="np")
    expected = theirs["pixel_values"].transpose(0, 2, 3, 1)
    ours = ClipResizer(224, 224, MEAN, STD)(noise(height, width))
    assert np.abs(ours - expected).max() < TOLERANCE
