"""Inputs and outputs of the modules of each block, for reconstruction.

TaQ-DiT and QDrop learn rounding module by module, from a module's input and its output at full
precision. The result is a calibration set of its own: one item for each sample, in the same shards,
so it is resumed, verified, repaired and merged like any other.

A feed-forward works on each token alone: of its tokens some are kept, the same ones of input and
output. Each output of an attention depends on all tokens, so its inputs are kept whole and its
outputs at the chosen tokens.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.model_session import require_model
from lydite.calibrate.replay import Replay, latent_of, replaying
from lydite.calibrate.settings import BLOCKS, STORE_DTYPES, Dtype, Plan, Settings
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import NAME, read_description
from lydite.calibrate.store.writer import Writer, command_line
from lydite.core.dtypes import NUMPY_DTYPES, widen
from lydite.core.errors import CalibrationError, InputError, NotFiniteError, at, shown
from lydite.core.files import require_space, size_text
from lydite.pipelines.family import BlockRule
from lydite.pipelines.pipeline import Pipeline
from lydite.trace.arrays import to_numpy
from lydite.weights.load import to_mlx

SLOTS = re.compile(r"in\.(\d+|encoder_hidden_states)|out(\.\d+)?")
EMPTY, LABELS = 1 << 16, 512  # bytes at most: of an empty set, of a tensor in a header
STREAMS = ("image", "text", "both")  # of BlockRule.streams; the order decides which tokens are kept
Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class BlockOptions:
    """How much is stored of each sample."""

    tokens: int = 0  # of each stream; 0: all
    dtype: Dtype = "F16"
    modules: str = "*"  # a pattern for their names


@dataclass(frozen=True)
class SizeEstimate:
    """What will be written, known before it begins."""

    images: int
    of: int
    samples: int
    bytes: int  # at most: arrays, and what the headers say of each


class BlockRecorder:
    """The observer that keeps what modules take and give, at the chosen tokens."""

    def __init__(self, rules: Sequence[BlockRule], tokens: int, modules: str = "*") -> None:
        self._rules, self._tokens, self._modules = rules, tokens, modules
        self._key = "0"
        self.tensors: Tensors = {}

    def begin(self, key: str) -> None:
        """Forget the last sample; the choice of tokens follows from the key of this one."""
        self._key, self.tensors = key, {}

    def wants(self, path: str, slot: str) -> bool:
        """Units of reconstruction, all that they take and give."""
        known = self._rule(path) and SLOTS.fullmatch(slot)
        return bool(known and fnmatchcase(path, self._modules))

    def add(self, path: str, slot: str, value: Any) -> None:
        """Copy the tokens that are kept of (B, L, D).

        Where each prompt is a call of its own, only the first is kept: that of the prompt itself.
        """
        if f"{path}.{slot}" in self.tensors:
            return
        rule = self._rule(path)
        stream = rule.streams.get(slot) if rule else None
        if stream is not None:
            chosen = self.chosen(stream, value.shape[1])
            known = self.tensors.setdefault(f"tokens.{stream}", chosen)
            if not np.array_equal(known, chosen):  # of another length, as at a U-Net's levels
                self.tensors[f"{path}.tokens"] = chosen
            value = value[:, to_mlx(chosen)]
        self.tensors[f"{path}.{slot}"] = np.array(widen(to_numpy(value)))

    def _rule(self, path: str) -> BlockRule | None:
        return next((rule for rule in self._rules if re.fullmatch(rule.modules, path)), None)

    def chosen(self, stream: str, length: int) -> NDArray[np.int64]:
        """The tokens of a stream that are kept of this sample, in order."""
        if not self._tokens or self._tokens >= length:
            return np.arange(length)
        seed = [int(self._key[:16], 16), STREAMS.index(stream)]
        picked = np.random.default_rng(seed).choice(length, self._tokens, replace=False)
        return np.sort(picked).astype(np.int64)


def store_blocks(
    opened: CalibrationSet,
    pipeline: Pipeline,
    folder: Path,
    stored: BlockOptions,
    budget: int,
    *,
    on_estimate: Callable[[SizeEstimate], None] = lambda _: None,
    on_sample: Callable[[int, int], None] = lambda done, total: None,
    stopping: Callable[[], bool] = lambda: False,
    options: Sequence[str] = (),
) -> SizeEstimate:
    """Write the blocks of as many whole images as the budget allows, evenly spread over the set.

    `options` say where the model is, for the command that errors name.
    """
    rows = _whole_images(opened)
    recorder = BlockRecorder(pipeline.family.blocks, stored.tokens, stored.modules)
    with replaying(pipeline, opened.settings, recorder) as replay:
        first = next(iter(rows.values()))
        size = _bytes(_tensors(opened, replay, recorder, first[0]), stored.dtype)
        if not size:
            raise InputError(
                f"--modules is {shown(stored.modules)}, which fits no attention or feed-forward. "
                "Give a pattern such as transformer_blocks.0.* or *.ff."
            )
        estimate = _estimate(size, len(rows), len(first), budget)
        chosen = _spread(list(rows), estimate.images)
        on_estimate(estimate)
        settings = _settings(opened.settings, stored)
        images = tuple(image for image in opened.plan.images if image.number in set(chosen))
        plan = Plan(images, opened.plan.steps, pictures=False)
        _check_same(folder, plan)
        again = _command(opened.folder, folder, stored, budget, options)
        with Writer.start(folder, settings, plan, resume=again) as writer:
            missing = {image.number: steps for image, steps in writer.missing().items()}
            todo = [row for n in chosen for row in rows[n] if row.step in missing.get(n, [])]
            require_space(folder, size * len(todo))
            for done, row in enumerate(todo, estimate.samples - len(todo) + 1):
                tensors = _tensors(opened, replay, recorder, row)
                writer.commit([_item(writer, row, tensors)])
                on_sample(done, estimate.samples)
                if stopping():
                    raise KeyboardInterrupt
    require_model(opened.settings, pipeline)  # the observer changed nothing
    return estimate


def _tensors(opened: CalibrationSet, replay: Replay, recorder: BlockRecorder, row: Row) -> Tensors:
    recorder.begin(row.key)
    replay.run(row.entry, latent_of(opened, row))
    for name, array in recorder.tensors.items():
        if not np.isfinite(array).all():
            raise NotFiniteError(
                f"{row.entry.label}: {name}: NaN or Inf among its values. Nothing can "
                "be learned from it; run the model in float32, or verify the set."
            )
    return recorder.tensors


def _item(writer: Writer, row: Row, tensors: Tensors) -> Any:
    entry = row.entry
    assert entry.image is not None and entry.step is not None, "a sample has both"
    labels = {"sigma": entry.sigma, "timestep": entry.timestep}
    return writer.builder.sample(entry.image, entry.step, tensors, **labels)


def _command(
    source: Path, folder: Path, stored: BlockOptions, budget: int, options: Sequence[str]
) -> str:
    """The command that resumes it."""
    tokens = ("--tokens", stored.tokens) if stored.tokens else ()
    modules = ("--modules", stored.modules) if stored.modules != "*" else ()
    dtype = next(name for name, code in STORE_DTYPES.items() if code == stored.dtype)
    words = (*tokens, *modules, "--budget", budget, "--store-dtype", dtype, *options)
    return command_line("lydite", "calibrate", "blocks", source, "--out", folder, *words)


def _check_same(folder: Path, plan: Plan) -> None:
    """A budget holds for the whole folder: what is there must be what is asked for."""
    if (folder / NAME).exists() and read_description(folder).plan != plan:
        raise CalibrationError(
            f"{at(folder)}: holds other images: --budget, or the set, was another. Give the same "
            "to resume it, or another folder."
        )


def _settings(source: Settings, stored: BlockOptions) -> Settings:
    """Those of the set, and how its blocks were stored."""
    details: dict[str, Any] = {"tokens": stored.tokens, "latents": source.dtype}
    if stored.modules != "*":
        details["modules"] = stored.modules
    conditions = {**source.conditions, BLOCKS: details}
    return Settings(source.model_hash, conditions, stored.dtype, source.model)


def _estimate(size: int, images: int, steps: int, budget: int) -> SizeEstimate:
    each = size * steps
    fit = min(images, (budget - EMPTY) // each)
    if fit < 1:
        raise InputError(
            f"--budget is {size_text(budget)}, and one image with its {steps} samples takes "
            f"{size_text(EMPTY + each)}. Give more, or keep fewer --tokens or --modules."
        )
    return SizeEstimate(fit, images, fit * steps, EMPTY + fit * each)


def _spread(numbers: list[int], count: int) -> list[int]:
    """So many of the numbers, evenly."""
    return [numbers[index * len(numbers) // count] for index in range(count)]


def _bytes(tensors: Tensors, dtype: Dtype) -> int:
    width = NUMPY_DTYPES[dtype].itemsize
    return sum(
        array.size * (width if array.dtype.kind == "f" else array.itemsize) + LABELS
        for array in tensors.values()
    )


def _whole_images(opened: CalibrationSet) -> dict[int, list[Row]]:
    """The samples of each image that has all its steps, in order."""
    found: dict[int, list[Row]] = {}
    for row in opened.rows("sample"):
        assert row.image is not None, "a sample has an image"
        found.setdefault(row.image, []).append(row)
    whole = {n: rows for n, rows in found.items() if len(rows) == len(opened.plan.steps)}
    if not whole:
        raise CalibrationError(
            f"{at(opened.folder)}: holds no image with all its steps. Run: lydite calibrate status "
            f"{at(opened.folder)}"
        )
    return whole
