"""The judge and the accuracy worked out from its answers."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from lydite.embedded.captions import caption
from lydite.embedded.scenes import (
    COLORS,
    RADII,
    SIDE,
    Scene,
    Scenes,
    Thing,
    paint,
    sample_scenes,
)
from lydite.embedded.shapes import SHAPES
from lydite.evaluate import prompt_accuracy
from lydite.evaluate.embedded_metrics import are_captions, fits
from lydite.evaluate.judge import load_judge
from lydite.evaluate.prompt_accuracy import (
    PromptAccuracy,
    Reading,
    SeenObject,
    check,
    read,
    score,
)
from support.distance import relative_l2

ROOT = Path(__file__).parents[2]
TRAINED = [
    path
    for folder in ("src/lydite/embedded/model", "build/model")
    if (path := ROOT / folder / "judge.safetensors").exists()
]
SCENES = sample_scenes(300, 21)
ALL_SAID = [SCENES.scene(index) for index in range(len(SCENES))]
CELLS = SIDE // prompt_accuracy.STRIDE


def _answers(scenes: Scenes, sure: float = 0.9) -> np.ndarray:
    """What a network that makes no mistake would answer."""
    answers = np.zeros((len(scenes), CELLS, CELLS, prompt_accuracy.ANSWERS), np.float32)
    answers[..., prompt_accuracy.PRESENT] = -9
    for slot in range(3):
        index = (scenes.count > slot).nonzero()[0]
        x, y = (
            scenes.x[index, slot] / prompt_accuracy.STRIDE,
            scenes.y[index, slot] / prompt_accuracy.STRIDE,
        )
        column, row = x.astype(int), y.astype(int)
        one = np.zeros((len(index), prompt_accuracy.ANSWERS), np.float32)
        one[:, prompt_accuracy.PRESENT] = (
            np.log(sure / (1 - sure)) + 0.01 * slot
        )  # the last is surest
        one[:, prompt_accuracy.OFFSET] = np.stack([x - column - 0.5, y - row - 0.5], axis=1)
        one[:, prompt_accuracy.RADIUS] = scenes.radius[index, slot] / prompt_accuracy.RADIUS_UNIT
        one[:, prompt_accuracy.SHAPE] = np.eye(len(SHAPES))[scenes.shape[index, slot]]
        one[:, prompt_accuracy.COLOR] = np.eye(len(COLORS))[scenes.color[index, slot]]
        answers[index, row, column] = one
    return answers


def _score(scenes: Scenes, says: list[Scene]) -> PromptAccuracy:
    """Objects are read off the answers alone: a picture needs no more than its background."""
    ends = np.repeat(scenes.background_rgb, int(prompt_accuracy.MARGIN), axis=1)  # (N, 8, 3)
    pictures = np.round(ends[:, :, None] * 255).astype(np.uint8)
    return score(read(_answers(scenes), pictures), says)


def _at_first(array: Any, values: Any) -> Any:
    return np.concatenate([values[:, None], array[:, 1:]], axis=1)


def _other_shape(scenes: Scenes) -> Scenes:
    return replace(scenes, shape=_at_first(scenes.shape, (scenes.shape[:, 0] + 1) % len(SHAPES)))


def _other_color(scenes: Scenes) -> Scenes:
    return replace(scenes, color=_at_first(scenes.color, (scenes.color[:, 0] + 1) % len(COLORS)))


def _other_size(scenes: Scenes) -> Scenes:
    radius = np.array([RADII[1][0], RADII[0][1]])[scenes.size[:, 0]]  # the nearest of the other
    return replace(scenes, radius=_at_first(scenes.radius, radius))


def _other_column(scenes: Scenes) -> Scenes:
    x = np.choose((scenes.cell + 1) % 3, [42, 64, 86])
    return replace(scenes, x=_at_first(scenes.x, np.where(scenes.count == 1, x, scenes.x[:, 0])))


def _mirrored(scenes: Scenes) -> Scenes:
    many, row = (scenes.count > 1)[:, None], (scenes.relation == 0)[:, None]
    return replace(
        scenes,
        x=np.where(many & row, SIDE - scenes.x, scenes.x),
        y=np.where(many & ~row, SIDE - scenes.y, scenes.y),
    )


def _other_background(scenes: Scenes) -> Scenes:
    return replace(scenes, background_rgb=scenes.background_rgb[:, ::-1])


OBJECTS, MANY = int(SCENES.count.sum()), SCENES.count > 1
FADING = SCENES.background[:, 0] != SCENES.background[:, 1]
EACH = np.ones(len(SCENES), bool)


def test_nothing_is_wrong_with_the_truth() -> None:
    result = _score(SCENES, ALL_SAID)
    assert result.prompts == len(SCENES)
    assert result.everything == 1
    assert result.attributes == dict.fromkeys(prompt_accuracy.ATTRIBUTES, 1.0)


@pytest.mark.parametrize(
    "name, change, touched, stated",
    [
        ("shape", _other_shape, EACH, OBJECTS),
        ("color", _other_color, EACH, OBJECTS),
        ("size", _other_size, EACH, OBJECTS),
        ("position", _other_column, ~MANY, int((~MANY).sum())),
        ("relation", _mirrored, MANY, int(MANY.sum())),
        ("background", _other_background, FADING, len(SCENES)),
    ],
)
def test_a_wrong_attribute_counts_under_its_own_name(
    name: str, change: Callable[[Scenes], Scenes], touched: Any, stated: int
) -> None:
    result = _score(change(SCENES), ALL_SAID)
    expected = dict.fromkeys(prompt_accuracy.ATTRIBUTES, 1.0) | {name: 1 - touched.sum() / stated}
    assert result.attributes == pytest.approx(expected)
    assert result.everything == pytest.approx(1 - touched.mean())


def test_one_object_too_many_is_a_wrong_count_only() -> None:
    answers = _answers(SCENES)
    for index, scene in enumerate(ALL_SAID):
        corner = max(
            ((row, column) for row in (0, 15) for column in (0, 15)),
            key=lambda at: -answers[index, :, :, prompt_accuracy.PRESENT][_around(*at)].max(),
        )
        shapes = {thing.shape for thing in scene.things}
        answers[index][corner] = 0
        answers[index][corner][prompt_accuracy.PRESENT] = 9  # surer than any other
        answers[index][corner][prompt_accuracy.SHAPE] = np.eye(8)[min(set(range(8)) - shapes)]
    result = score(read(answers, paint(SCENES)), ALL_SAID)
    assert result.attributes == dict.fromkeys(prompt_accuracy.ATTRIBUTES, 1.0) | {"count": 0.0}
    assert result.everything == 0


@pytest.mark.parametrize("rank", range(6))
def test_of_many_objects_the_four_surest_are_judged(rank: int) -> None:
    wanted, other = Thing(1, 1, 1), Thing(0, 0, 0)
    seen = [SeenObject(wanted if n == rank else other, 9, 9, 0.9 - 0.1 * n) for n in range(6)]
    for objects in seen, seen[::-1]:
        marks = check(Reading(tuple(objects), (0, 0)), Scene((wanted,), None, None, None))
        assert marks["shape"] == marks["color"] == marks["size"] == [rank < 4]


def _around(row: int, column: int) -> tuple[slice, slice]:
    return slice(max(row - 1, 0), row + 2), slice(max(column - 1, 0), column + 2)


def test_a_missing_object_has_nothing_right() -> None:
    one = SCENES[MANY & (SCENES.count == 2)]
    says = [one.scene(index) for index in range(len(one))]
    result = _score(replace(one, count=one.count - 1), says)
    half = {name: 0.5 for name in ("shape", "color", "size")}
    assert result.attributes == half | {"count": 0.0, "relation": 0.0, "background": 1.0}


def test_what_a_caption_leaves_open_cannot_be_wrong() -> None:
    rng = Random(22)
    for _ in range(4):
        says = [caption(scene, rng).says for scene in ALL_SAID]
        assert _score(SCENES, says).everything == 1
    nothing = [
        Scene((Thing(None, None, None),) * len(scene.things), None, None, None)
        for scene in ALL_SAID
    ]
    changed = _other_shape(_other_color(_other_size(_other_column(_mirrored(SCENES)))))
    assert _score(changed, nothing).attributes == {"count": 1.0}


@pytest.mark.parametrize("relation", [0, 1])
def test_two_objects_called_the_same_are_told_apart_by_place(relation: int) -> None:
    """A star left of a star: whichever of them the network is surer of."""
    pair = SCENES[(SCENES.count == 2) & (SCENES.relation == relation)]
    star = Thing(SHAPES.index("star"), None, None)
    stars = replace(pair, shape=np.full_like(pair.shape, star.shape))
    says = [Scene((star, star), relation, None, None)] * len(pair)
    assert _score(stars, says).everything == 1
    says = [replace(scene, relation=1 - relation) for scene in says]
    assert _score(stars, says).attributes["relation"] == 0


def test_an_object_between_two_cells_is_found_once() -> None:
    one = SCENES[(SCENES.count == 1) & (SCENES.cell == 4)][:1]
    for sure, found in ((0.4, 1), (0.2, 0)):
        answers = _answers(one, sure)
        row, column = divmod(int(answers[0, ..., prompt_accuracy.PRESENT].argmax()), CELLS)
        answers[0, row, column + 1] = answers[0, row, column]
        answers[0, row, column + 1, prompt_accuracy.PRESENT] -= 0.1
        (reading,) = read(answers, paint(one))
        assert len(reading.objects) == found


@pytest.fixture(scope="module")
def reference() -> Any:
    """The network as tools/train_embedded.py has it."""
    for needed in ("torch", "diffusers", "transformers"):
        pytest.importorskip(needed)
    path = ROOT / "tools" / "train_embedded.py"
    spec = importlib.util.spec_from_file_location("train_embedded", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool.Judge(normalized=False).to("cpu").requires_grad_(False).eval()


def _run(reference: Any, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import torch

    answers, features = reference(torch.from_numpy(pictures).permute(0, 3, 1, 2) / 127.5 - 1)
    return answers.permute(0, 2, 3, 1).numpy(), features.numpy()


@pytest.mark.parity
def test_the_network_is_the_one_that_was_trained(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    for weight in reference.parameters():
        weight.mul_(2)  # so that what the picture says outweighs the biases
    save_file(reference.state_dict(), tmp_path / "judge.safetensors")
    judge = load_judge(tmp_path / "judge.safetensors")
    monkeypatch.setattr("lydite.evaluate.judge.BATCH", 2)
    pictures = paint(SCENES[:3])  # more than one batch
    answers, features = _run(reference, pictures)
    ours = np.concatenate([np.array(part) for part, _ in judge._batches(pictures)])
    assert relative_l2(ours, answers) <= 1e-5  # float32
    assert relative_l2(judge.features(pictures), features) <= 1e-5


@pytest.mark.skipif(not TRAINED, reason="no trained judge")
def test_the_trained_judge_reads_drawn_scenes() -> None:
    few = SCENES[:12]  # MLX takes 0.15 s each on a CPU
    assert score(load_judge(TRAINED[0]).readings(paint(few)), ALL_SAID[:12]).everything == 1


@pytest.mark.parity
@pytest.mark.skipif(not TRAINED, reason="no trained judge")
def test_the_trained_judge_reads_many_drawn_scenes(reference: Any) -> None:
    """In torch, which is thirty times as fast on a CPU as MLX, and the same network."""
    from safetensors.torch import load_file

    reference.load_state_dict(load_file(TRAINED[0]))
    scenes = sample_scenes(500, 23)
    says = [scenes.scene(index) for index in range(len(scenes))]
    pictures = paint(scenes)
    parts = [_run(reference, pictures[at : at + 50])[0] for at in range(0, len(scenes), 50)]
    assert score(read(np.concatenate(parts), pictures), says).everything >= 0.99


def test_things_that_are_missing_are_wrong_however_many() -> None:
    """One object of three that a prompt names: it alone is right."""
    many = next(scene for scene in ALL_SAID if len(scene.things) == 3)
    seen = prompt_accuracy.SeenObject(many.things[0], 20.0, 20.0, 0.9)
    marks = prompt_accuracy.check(prompt_accuracy.Reading((seen,), (0, 0)), many)
    assert sorted(marks["shape"]) == [False, False, True] and marks["count"] == [False]
    assert not any(marks["relation"])


def test_which_pictures_the_judge_can_read() -> None:
    assert fits(np.zeros((SIDE, SIDE, 3), np.uint8))
    for shape in ((SIDE, SIDE + 1, 3), (SIDE - 1, SIDE, 3), (SIDE, SIDE, 4)):
        assert not fits(np.zeros(shape, np.uint8))
    said = caption(ALL_SAID[0], Random(0)).text
    assert are_captions([said]) and not are_captions([said, "a castle"])


@pytest.mark.parametrize(("along", "third"), [(0, 0), (48.9, 0), (49, 1), (78.9, 1), (79, 2)])
def test_an_object_on_an_edge_of_the_grid_is_in_the_later_cell(along: float, third: int) -> None:
    thing = Thing(0, 0, 0)
    assert prompt_accuracy.cell_of(SeenObject(thing, along, 0, 1)) == third
    assert prompt_accuracy.cell_of(SeenObject(thing, 0, along, 1)) == 3 * third


@pytest.mark.parametrize(("radius", "large"), [(18.5, 0), (18.6, 1)])
def test_an_answer_is_read_in_pixels(radius: float, large: int) -> None:
    answers = np.full((1, CELLS, CELLS, prompt_accuracy.ANSWERS), -20, np.float32)
    answers[0, 3, 5] = 0
    answers[0, 3, 5, : 4 + 3] = 1, 0.25, -0.5, radius / 16, 0, 0, 1  # right and down, of a cell
    (reading,) = read(answers, np.zeros((1, SIDE, SIDE, 3), np.uint8))
    (seen,) = reading.objects
    assert (seen.x, seen.y, seen.thing.size, seen.thing.shape) == (46, 24, large, 2)
    answers[0, 3, 5, 1:3] = 99, -99
    (seen,) = read(answers, np.zeros((1, SIDE, SIDE, 3), np.uint8))[0].objects
    assert (seen.x, seen.y) == (SIDE, 0)


def test_objects_are_in_order_when_further_along_than_aside() -> None:
    def seen(x: float, y: float) -> SeenObject:
        return SeenObject(Thing(0, 0, 0), x, y, 1)

    for ahead, aside, ordered in ((10, 9, True), (10, 10, False), (10, -10, False), (0, 0, False)):
        assert prompt_accuracy._in_order((seen(5, 50), seen(5 + ahead, 50 + aside)), 0) == ordered
        assert prompt_accuracy._in_order((seen(50, 5), seen(50 + aside, 5 + ahead)), 1) == ordered
