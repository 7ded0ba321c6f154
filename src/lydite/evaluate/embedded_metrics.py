"""Metrics of the embedded model's pictures: what the judge reads, and its features.

They need no weights from outside. They apply to pictures of 128×128 whose prompts use only the
words of the model's captions.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lydite import embedded
from lydite.embedded.captions import held_out_prompts, split, words
from lydite.embedded.scenes import SIDE, Scene
from lydite.evaluate.judge import Judge, load_judge
from lydite.evaluate.prompt_accuracy import Reading, check
from lydite.pipelines.picture import Pixels
from lydite.weights.load import parameter_hash

SEED = 99991  # of the held-out prompts; training drew from others
MOST = 4096  # held-out prompts


@cache
def held_out() -> Mapping[str, Scene]:
    """Prompts with pairs of objects that training never showed, and what each says."""
    return {prompt.text: prompt.says for prompt in held_out_prompts(MOST, SEED)}


def are_captions(prompts: Iterable[str]) -> bool:
    """Whether every prompt uses only words of the embedded model's captions."""
    known = set(words())
    return all(known.issuperset(split(prompt)) for prompt in prompts)


class JudgeFeatures:
    """The judge as a feature network."""

    name = "judge of the embedded model"
    preprocess = "none"

    def __init__(self) -> None:
        self._judge = open_judge()
        self.digest = parameter_hash(self._judge)

    def __call__(self, pixels: Pixels) -> dict[str, NDArray[np.float32]]:
        return {"judge": self._judge.features(pixels)}


def open_judge() -> Judge:
    """With the weights inside the package."""
    return load_judge(embedded.MODEL / "judge.safetensors")


def fits(pixels: Pixels) -> bool:
    """Whether the judge can read this picture."""
    return pixels.shape == (SIDE, SIDE, 3)


def is_right(reading: Reading, says: Scene) -> bool:
    """Whether a picture shows all that its prompt says."""
    return all(mark for marks in check(reading, says).values() for mark in marks)


def count_right(judge: Judge, pictures: NDArray[np.uint8], says: Sequence[Scene]) -> list[bool]:
    """For each picture whether all is right."""
    readings = judge.readings(pictures)
    return [is_right(reading, scene) for reading, scene in zip(readings, says, strict=True)]
