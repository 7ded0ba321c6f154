"""The judge: a small convolutional network that reads objects off a picture of a drawn scene.

It marks the cell of an 8-pixel grid where an object has its centre, and classifies the object. It
was trained on drawn scenes by tools/train_embedded.py, which holds the same network in torch.
"""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from lydite.core.checkpoint import open_checkpoint
from lydite.evaluate.prompt_accuracy import ANSWERS, DEPTH, STEM, WIDTH, Reading, read
from lydite.weights.audit import TensorView
from lydite.weights.load import load
from lydite.weights.rules import OIHW_TO_OHWI, Convert

RULES = (Convert("{p}.weight", OIHW_TO_OHWI),)  # stored as torch has it
BATCH = 32


class Judge(nn.Module):
    """Pictures in −1 to 1 (N, H, W, 3) to answers (N, H/8, W/8, ANSWERS) and features (N, 96)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = [
            nn.Conv2d(before, after, 3, stride=stride, padding=1) for before, after, stride in STEM
        ]
        self.body = [nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(DEPTH)]
        self.head = nn.Conv2d(WIDTH, ANSWERS, 1)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        for layer in self.stem:
            x = nn.silu(layer(x))
        for layer in self.body:
            x = x + nn.silu(layer(x))
        return self.head(x), x.mean(axis=(1, 2))

    def readings(self, pictures: NDArray[np.uint8]) -> list[Reading]:
        """What is in each picture (N, 128, 128, 3)."""
        answers = [np.array(answer) for answer, _ in self._batches(pictures)]
        return read(np.concatenate(answers), pictures)

    def features(self, pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
        """A vector per picture, for a Fréchet distance between two sets: (N, 96)."""
        return np.concatenate([np.array(features) for _, features in self._batches(pictures)])

    def _batches(self, pictures: NDArray[np.uint8]) -> Iterator[tuple[mx.array, mx.array]]:
        for start in range(0, len(pictures), BATCH):
            batch = mx.array(pictures[start : start + BATCH]).astype(mx.float32) / 127.5 - 1
            both = self(batch)
            mx.eval(both)  # one batch's activations at a time
            yield both


def load_judge(path: Path) -> Judge:
    """The judge with its trained weights, in float32."""
    judge = Judge()
    with open_checkpoint(path) as checkpoint:
        load(judge, TensorView(checkpoint), RULES, where=str(path), dtype=mx.float32)
    return judge
