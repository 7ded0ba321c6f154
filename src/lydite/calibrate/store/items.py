"""Items made of arrays: labels come from the plan, so a sample cannot name the wrong prompt."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.settings import Image, conditioning_key, picture_key, sample_key
from lydite.calibrate.store.set_file import Description
from lydite.calibrate.store.shards import Item, make_item
from lydite.core.errors import CalibrationError


class Maker:
    """Makes the items of one set."""

    def __init__(self, description: Description) -> None:
        self.settings, self.plan = description.settings, description.plan
        self._images = {image.number: image for image in description.plan.images}

    def sample(
        self,
        image: int,
        step: int,
        tensors: Mapping[str, NDArray[Any]],
        *,
        sigma: float | None = None,
        timestep: float | None = None,
    ) -> Item:
        """What went into the network at one step of one image."""
        planned = self.image(image)
        key = sample_key(self.settings, planned, step)
        numbers = {"sigma": _number(sigma), "timestep": _number(timestep)}
        return self._item("sample", key, planned, tensors, step=step, **numbers)

    def picture(self, image: int, pixels: NDArray[Any]) -> Item:
        """A finished picture, kept to be looked at and measured."""
        planned = self.image(image)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] != 3:
            raise CalibrationError(
                f"image {image}: expected pixels of height × width × 3 in uint8, found "
                f"{list(pixels.shape)} in {pixels.dtype}."
            )
        key = picture_key(self.settings, planned)
        return self._item("picture", key, planned, {"pixels": pixels})

    def conditioning(self, prompt: str, tensors: Mapping[str, NDArray[Any]]) -> Item:
        """What the text encoders make of a prompt: once, whatever the images and steps."""
        key = conditioning_key(self.settings, prompt)
        return make_item("conditioning", key, prompt, tensors, self.settings.dtype)

    def image(self, number: int) -> Image:
        """The planned image of that number."""
        if number not in self._images:
            raise CalibrationError(f"image {number} is not in the plan of this set.")
        return self._images[number]

    def _item(
        self, kind: Any, key: str, image: Image, tensors: Mapping[str, NDArray[Any]], **labels: Any
    ) -> Item:
        labels |= {"image": image.number, "seed": image.seed}
        return make_item(kind, key, image.prompt, tensors, self.settings.dtype, **labels)


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)
