"""Inpainting: what is under a mask is drawn anew, the rest of the picture stays.

Reference: diffusers 0.42.1, pipelines/stable_diffusion/pipeline_stable_diffusion_inpaint.py. A
plain model draws everything, and after each step the rest is replaced by the picture with noise. A
model with 9 input channels, or FLUX.1-Fill, is shown the mask and the rest of the picture instead.
"""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from lydite.core.errors import InputError
from lydite.pipelines.picture import Pixels, given_image, opened_image, to_grey
from lydite.sampling.denoiser import Prediction

Mask = NDArray[np.uint8]  # (H, W): from 128 on drawn anew


def read_mask(path: Path) -> Mask:
    """The brightness of an image file, turned as its EXIF says."""
    with opened_image(path) as image:
        return to_grey(image)


def as_mask(mask: object) -> Mask:
    """The mask of a run, as the command line reads it from a file; InputError."""
    if isinstance(mask, np.ndarray) and mask.dtype == np.bool_:
        mask = mask.astype(np.uint8) * 255
    given = given_image(mask, "mask")
    try:
        grey = to_grey(given if isinstance(given, Image.Image) else Image.fromarray(given))
    except ValueError as error:
        raise InputError(f"mask: {error}.") from error
    if grey.max(initial=0) == 1:
        raise InputError("mask: expected 255 where it is drawn anew, found values 0 and 1.")
    return grey


def fit_mask(mask: Mask, width: int, height: int, feather: int) -> Mask:
    """At the size of the picture, with a soft edge."""
    image = Image.fromarray(mask)
    if mask.shape != (height, width):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(image.filter(ImageFilter.GaussianBlur(feather)) if feather else image)


def hide(image: Pixels, mask: Mask) -> NDArray[np.float32]:
    """The picture from -1 to 1, mid-grey under the mask: (H, W, 3)."""
    return (image.astype(np.float32) / 127.5 - 1) * (mask < 128)[:, :, None]


def overlay(pixels: Pixels, image: Pixels, mask: Mask) -> Pixels:
    """The new picture under the mask, the old one elsewhere, mixed where the mask is grey."""
    parts = (Image.fromarray(pixels), Image.fromarray(image), Image.fromarray(mask))
    return np.asarray(Image.composite(*parts))


@dataclass(frozen=True, eq=False)
class Inpainting:
    """What the steps of one batch need."""

    mask: mx.array  # (1, h, w, 1): 1 is drawn anew
    prediction: Prediction
    clean: mx.array | None = None  # latents of the picture, (B, h, w, C); None: nothing is replaced
    noise: mx.array | None = None  # the noise of the start
    channels: mx.array | None = None  # what the network takes beside the latents: (B, h, w, …)

    def blend(self, x: mx.array, sigma: float) -> mx.array:
        """Latents at `sigma`, outside of the mask those of the picture."""
        if self.clean is None or self.noise is None:
            return x
        return self.replace(x, self.prediction.noised(self.clean, self.noise, sigma))

    def finish(self, x: mx.array, scale: float) -> mx.array:
        """Finished latents, `scale` times as large as the picture's."""
        return x if self.clean is None else self.replace(x, self.clean * scale)

    def replace(self, x: mx.array, kept: mx.array) -> mx.array:
        return mx.where(self.mask > 0, x, kept)


def latent_mask(mask: Mask, factor: int) -> mx.array:
    """One pixel of the binary mask for each of the latents: (1, h, w, 1)."""
    binary = (mask[::factor, ::factor] >= 128).astype(np.float32)
    return mx.array(binary)[None, :, :, None]


def mask_channels(mask: Mask, rest: mx.array, factor: int) -> mx.array:
    """One pixel of the mask, then the latents of the rest (B, h, w, C): (B, h, w, 1 + C)."""
    shown = mx.broadcast_to(latent_mask(mask, factor), (*rest.shape[:-1], 1))
    return mx.concatenate([shown, rest], axis=-1)
