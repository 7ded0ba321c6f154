"""One comparison of two folders: every figure, the cache of features, and the page."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from lydite.calibrate.npz_files import npz_bytes
from lydite.calibrate.settings import Settings, plan_of
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import FileError, InputError
from lydite.embedded.scenes import paint, sample_scenes
from lydite.evaluate import embedded_metrics, evaluation
from lydite.evaluate.distributions import (
    Moments,
    frechet_distance,
    gaussian_mmd,
    kernel_distance,
)
from lydite.evaluate.evaluation import (
    Evaluation,
    Networks,
    Options,
    Pair,
    _share,
    count_ticks,
    damage,
    evaluate,
    evaluate_one,
    lower_is_better,
    require_something,
)
from lydite.evaluate.feature_table import feature_table
from lydite.evaluate.flat_field import WINDOW, residual_noise
from lydite.evaluate.paired import psnr
from lydite.evaluate.pictures import FolderPictures, common_names, open_source
from lydite.report.evaluation import _difference, page


def _folders(tmp_path: Path, noises: tuple[int, ...] = (0, 4, 30)) -> tuple[Path, Path]:
    g = np.random.Generator(np.random.PCG64(3))
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in one, other:
        folder.mkdir()
    for noise in noises:
        picture = g.integers(30, 220, (40, 32, 3)).astype(np.uint8)
        Image.fromarray(picture).save(one / f"noise {noise}.png")
        changed = picture + g.integers(-noise, noise + 1, picture.shape)
        Image.fromarray(changed.clip(0, 255).astype(np.uint8)).save(other / f"noise {noise}.png")
    return one, other


def _evaluate(folders: tuple[Path, Path], options: Options) -> Evaluation:
    sources = open_source(folders[0]), open_source(folders[1])
    return evaluate(*sources, common_names(*sources), options)


def test_figures_of_two_folders(tmp_path: Path) -> None:
    folders = _folders(tmp_path)
    evaluation = _evaluate(folders, Options())
    assert [pair.name for pair in evaluation.worst] == ["noise 30", "noise 4"]
    assert evaluation.identical == 1  # which is not among the worst
    read = [np.asarray(Image.open(folder / "noise 30.png")) for folder in folders]
    assert evaluation.paired["psnr"].min == psnr(*read)
    assert evaluation.paired["ssim"].n == 3 and "ms_ssim" not in evaluation.paired
    assert evaluation.warnings == [
        "3 pictures: too few for a 95 % interval. Draw at least 5; 32 or more are better."
    ]
    assert evaluation.paired["psnr"].ci95 is None
    assert "176 pixels" in evaluation.record["metrics"]["ms_ssim"]
    plain = msgspec.json.decode(evaluation.to_json())
    assert {"mean", "median", "ci95", "n"} <= plain["paired"]["psnr"].keys()
    assert plain["record"]["pictures"] == {"reference": 3, "candidate": 3, "pairs": 3}
    assert evaluation.to_json() == _evaluate(folders, Options()).to_json()


def test_what_is_to_be_known_of_either_side_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderPictures, "notes", lambda source: [f"about {source.folder.name}"])
    folders = _folders(tmp_path, (1, 2, 3, 4, 5))
    assert _evaluate(folders, Options()).warnings == ["about one", "about other"]
    sources = open_source(folders[0]), open_source(folders[1])
    network: Any = _Means()
    found = evaluate_one(sources[1], Options(Networks(inception=network))).warnings
    assert found == ["about other"]


def test_the_twenty_worst_pairs_are_listed(tmp_path: Path) -> None:
    found = _evaluate(_folders(tmp_path, tuple(range(22))), Options())
    assert [pair.name for pair in found.worst] == [f"noise {n}" for n in range(21, 1, -1)]
    assert "bootstrap-t, 2000 resamples" in found.record["metrics"]["ci95"]


@pytest.mark.parametrize(("count", "few"), [(1, True), (4, True), (5, False)])
def test_four_pictures_have_no_interval_and_five_have_one(
    count: int, few: bool, tmp_path: Path
) -> None:
    found = _evaluate(_folders(tmp_path, tuple(range(1, 1 + count))), Options())
    assert [("too few" in text) for text in found.warnings] == ([True] if few else [])
    assert (found.paired["psnr"].ci95 is None) == (_share([True] * count).ci95 is None) == few


@pytest.mark.parametrize("sides", [(180, 40, 20), (20, 40, 180)])
def test_metrics_are_those_that_the_smallest_pair_has(
    tmp_path: Path, sides: tuple[int, ...]
) -> None:
    for folder in "one", "other":
        (tmp_path / folder).mkdir()
        for number, side in enumerate(sides):
            Image.new("RGB", (side, side + 3), "red" if folder == "one" else "blue").save(
                tmp_path / folder / f"{number}.png"
            )
    evaluation = _evaluate((tmp_path / "one", tmp_path / "other"), Options())
    assert evaluation.paired.keys() == {"psnr", "ssim"} and evaluation.paired["ssim"].n == 3
    assert "176 pixels" in evaluation.record["metrics"]["ms_ssim"]


def test_intervals_stay_within_what_a_metric_can_be(tmp_path: Path) -> None:
    ends = {name: evaluation.LIMITS[name] for name in ("psnr", "ssim", "ms_ssim", "clip_score")}
    assert ends == {"psnr": (0, 100), "ssim": (-1, 1), "ms_ssim": (0, 1), "clip_score": (0, 100)}
    for name in ("lpips_alex", "lpips_vgg", "latent_error"):
        assert evaluation.LIMITS[name] == (0, np.inf)
    folders = _folders(tmp_path, (0, 1, 2, 90, 120))
    sources = open_source(folders[0]), open_source(folders[1])
    errors = np.array([[0.01], [0.01], [0.01], [0.01], [3.0]])
    found = evaluate(
        *sources, common_names(*sources), Options(), latent_errors=errors, kept_steps=(1,)
    ).paired
    for metric, low, high in (("psnr", 0, 100), ("ssim", -1, 1), ("latent_error", 0, np.inf)):
        interval = found[metric].ci95
        assert interval is not None and low <= interval[0] <= interval[1] <= high, metric
    assert (found["ssim"].ci95 or (0, 0))[1] == 1 and (found["latent_error"].ci95 or (1,))[0] == 0


class _Means:
    """A feature network of a few numbers that counts its calls."""

    name, digest, preprocess = "means", "0" * 64, "none"

    def __init__(self) -> None:
        self.batches: list[int] = []

    @property
    def pictures(self) -> int:
        return sum(self.batches)

    def __call__(self, pixels: NDArray[np.uint8]) -> Mapping[str, NDArray[np.float32]]:
        self.batches.append(len(pixels))
        means = pixels.reshape(len(pixels), -1, 3).mean(axis=1).astype(np.float32)
        return {"pool3": means, "spatial": means[:, :2], "logits": means}


def test_features_come_from_the_cache_the_second_time(tmp_path: Path) -> None:
    g = np.random.Generator(np.random.PCG64(4))
    pictures = [g.integers(0, 256, (8 + n % 2, 8, 3)).astype(np.uint8) for n in range(40)]
    network, cache = _Means(), tmp_path / "cache"
    first = feature_table(pictures, 40, network, cache)
    assert network.pictures == 40
    expected = [picture.reshape(-1, 3).mean(axis=0) for picture in pictures]
    np.testing.assert_allclose(first["pool3"], expected, rtol=1e-6)
    damaged = next(cache.rglob("*.npz"))
    damaged.write_bytes(b"damaged")
    again = feature_table(pictures, 40, network, cache)
    assert network.pictures == 41  # the damaged one alone
    for name in first:
        assert np.array_equal(first[name], again[name])
    for changed in ("digest", "preprocess"):  # other weights, or pictures resized in another way
        other = _Means()
        setattr(other, changed, "1" * 64)
        feature_table(pictures, 40, other, cache)
        assert other.pictures == 40


def test_pictures_of_one_size_are_computed_together_up_to_a_limit() -> None:
    pictures = [np.full((8, 8 if n < 36 else 9, 3), n, np.uint8) for n in range(40)]
    network, ticks = _Means(), []
    table = feature_table(iter(pictures), 40, network, tick=lambda: ticks.append(1))
    assert network.batches == [16, 16, 4, 4] and len(ticks) == 40
    assert table["pool3"][:, 0].tolist() == list(range(40))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_few_pictures_have_the_metrics_that_they_suffice_for(count: int, tmp_path: Path) -> None:
    one, other = (_plain(tmp_path / name, range(100, 100 + count)) for name in ("one", "other"))
    networks: Any = Networks(inception=_Means(), clip=_Clip())  # type: ignore[arg-type]
    ticks: list[int] = []
    options = Options(networks, tick=lambda: ticks.append(1))
    found = evaluate(one, other, set(one.names), options)
    keys = {f"inception_score_{side}_none" for side in ("reference", "candidate")}
    keys |= {"clip_score_reference", "clip_score_candidate"}
    if count > 1:
        keys |= {"fid_none", "sfid_none", "kid_none", "clip_fid", "cmmd"}
    if count > 3:
        keys |= {"precision_none", "recall_none"}
    assert found.distribution.keys() == keys
    assert all(np.isfinite(distance.value) for distance in found.distribution.values())
    assert len(ticks) == count_ticks((one, other), set(one.names), options) == 5 * count


def test_a_set_by_itself(tmp_path: Path) -> None:
    source = _plain(tmp_path / "set", [220] * 4)
    networks: Any = Networks(inception=_Means(), clip=_Clip())  # type: ignore[arg-type]
    ticks: list[int] = []
    options = Options(networks, tick=lambda: ticks.append(1))
    found = evaluate_one(source, options)
    assert len(ticks) == count_ticks((source,), None, options) == 2 * 4
    assert found.distribution["clip_score"].value == pytest.approx(100)
    assert found.distribution["inception_score_none"].n == (4,)
    assert found.record["pictures"] == 4 and not found.paired and not found.worst
    source.prompts = {}
    assert evaluate_one(source, options).distribution.keys() == {"inception_score_none"}
    assert len(ticks) == 3 * 4 and count_ticks((source,), None, options) == 4
    assert not evaluate_one(source, Options()).distribution


def test_a_comparison_that_measures_nothing_is_refused() -> None:
    clip: Any = _Clip()
    with pytest.raises(InputError, match="--inception"):
        require_something(None, Options())
    require_something({"a"}, Options())
    for networks in Networks(inception=clip), Networks(clip=clip):
        require_something(None, Options(networks))


def test_distances_are_those_of_the_features(tmp_path: Path) -> None:
    folders = _folders(tmp_path, (0, 4, 8, 16, 30))
    network: Any = _Means()
    evaluation = _evaluate(folders, Options(Networks(inception=network)))
    one, other = (
        np.stack([p.reshape(-1, 3).mean(axis=0) for _, p in open_source(folder).pictures()])
        for folder in folders
    )
    expected = frechet_distance(Moments.of(one), Moments.of(other))
    assert evaluation.distribution["fid_none"].value == pytest.approx(expected, rel=1e-4)
    assert {
        "sfid_none",
        "kid_none",
        "precision_none",
        "recall_none",
    } <= evaluation.distribution.keys()
    assert any("biased" in warning for warning in evaluation.warnings)


class _Clip(_Means):
    """Looks at brightness: texts are dark or bright."""

    def __call__(self, pixels: NDArray[np.uint8]) -> Mapping[str, NDArray[np.float32]]:
        return {"image": super().__call__(pixels)["pool3"] - 128}

    def encode_text(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        return np.array([[1.0 if prompt == "bright" else -1.0] * 3 for prompt in prompts])


def _plain(folder: Path, levels: Sequence[int]) -> FolderPictures:
    """Even pictures of these levels of grey, and what they are called."""
    folder.mkdir()
    for number, level in enumerate(levels):
        Image.new("RGB", (16, 16), (level, level, level)).save(folder / f"{number:02}.png")
    source = FolderPictures.open(folder)
    source.prompts = dict.fromkeys(source.names, "bright")
    return source


def test_a_set_that_shows_half_of_the_other_is_precise_and_recalls_half(tmp_path: Path) -> None:
    dark, bright = range(20, 28), range(220, 228)
    network: Any = _Means()
    one, other = _plain(tmp_path / "one", [*dark, *bright]), _plain(tmp_path / "other", dark)
    found = evaluate(one, other, None, Options(Networks(inception=network)))
    assert found.distribution["precision_none"].value == 1
    assert found.distribution["recall_none"].value == 0.5
    assert found.distribution["fid_none"].n == (16, 8)
    assert any("sets of two sizes" in warning for warning in found.warnings)
    common = evaluate(one, other, set(other.names), Options(Networks(inception=network)))
    assert common.distribution["fid_none"].n == (8, 8)
    assert common.distribution["fid_none"].value == pytest.approx(0, abs=1e-6)
    assert not any("sets of two sizes" in warning for warning in common.warnings)


def test_a_picture_against_its_prompt_has_a_clip_score_of_0_and_not_below(tmp_path: Path) -> None:
    network: Any = _Clip()
    dark, bright = (_plain(tmp_path / f"{level}", [level] * 4) for level in (20, 220))
    found = evaluate(dark, bright, None, Options(Networks(clip=network))).distribution
    assert found["clip_score_reference"].value == 0
    assert found["clip_score_candidate"].value == pytest.approx(100)


def test_latent_errors_make_a_curve(tmp_path: Path) -> None:
    one, other = (open_source(folder) for folder in _folders(tmp_path))
    errors = np.array([[0.0, 0.01, 0.02, 0.04]] * 3)
    errors[:, -1] = 0.02, 0.04, 0.06
    evaluation = evaluate(
        one, other, set(one.names), Options(), latent_errors=errors, kept_steps=(0, 1, 2, 3)
    )
    assert evaluation.growth == pytest.approx(2)
    assert [step.error.mean for step in evaluation.steps] == pytest.approx([0, 0.01, 0.02, 0.04])
    html = page(evaluation, one, other).decode()
    for text in "Error over steps", "noise 30", "95 % interval", 'class="slider"':
        assert text in html
    assert "<script" not in html
    for name, worst in ("psnr", evaluation.paired["psnr"].min), ("latent_error", 0.06):
        row = next(row for row in html.split("<tr>") if f">{name}<" in row)
        assert f">{worst:.4g}<" in row.replace("\n", "")


def test_a_brighter_candidate_is_brighter_than_grey_in_the_difference() -> None:
    one = np.full((16, 16, 3), 100, np.uint8)
    for by in (-10, 0, 10):
        factor, difference = _difference(one, np.full_like(one, 100 + by))
        assert factor >= 4 and (difference == 128 + factor * by).all()


def test_noise_of_a_flat_field() -> None:
    g = np.random.Generator(np.random.PCG64(5))
    flat = np.full((80, 80, 3), 128.0)
    ramp = flat + np.linspace(-40, 40, 80)[None, :, None]
    for surface in flat, ramp:
        noises = [
            residual_noise((surface + g.normal(0, s, flat.shape)).round().astype(np.uint8))
            for s in (0, 2, 8)
        ]
        assert noises[0] < 0.5
        assert noises[1:] == pytest.approx([2, 8], rel=0.05)


def test_a_flat_field_needs_a_window_of_pixels() -> None:
    side = WINDOW.size
    assert residual_noise(np.full((side, side, 3), 7, np.uint8)) == pytest.approx(0, abs=1e-9)
    for shape in ((side - 1, side, 3), (side, side - 1, 3)):
        with pytest.raises(InputError, match="flat-field"):
            residual_noise(np.zeros(shape, np.uint8))


def test_features_that_cannot_be_compared_are_refused() -> None:
    good = np.random.default_rng(0).normal(size=(6, 4))
    for wrong in (good[0], good[None], np.where(good > 9, good, np.nan)):
        with pytest.raises(InputError, match="features are"):
            Moments.of(wrong)
    moments = Moments.of(good)
    with pytest.raises(InputError, match=r"expected \(N, 4\)"):
        moments.add(good[:, :3])
    moments.add(good[:0])
    assert moments.count == 6
    for one, other in ((good, good[:, :3]), (good[:1], good), (good, good[:1])):
        for distance in (kernel_distance, gaussian_mmd):
            with pytest.raises(InputError):
                distance(one, other)


def test_pairs_are_ordered_by_the_best_metric_that_they_have(tmp_path: Path) -> None:
    class Brightness:
        """Instead of LPIPS: the brighter the candidate, the further apart."""

        net, name, digest = "alex", "brightness", "d" * 64

        def __call__(self, one: NDArray[np.uint8], other: NDArray[np.uint8]) -> Any:
            assert one.shape == other.shape and one.ndim == 4
            return other.reshape(len(other), -1).mean(axis=1) / 255

    dark, mixed = _plain(tmp_path / "one", [0, 200, 90]), _plain(tmp_path / "other", [9, 210, 250])
    networks: Any = Networks(lpips=(Brightness(),))  # type: ignore[arg-type]
    found = evaluate(dark, mixed, set(dark.names), Options(networks))
    assert [pair.name for pair in found.worst] == ["02", "01", "00"]
    assert found.paired["lpips_alex"].max == pytest.approx(250 / 255)
    assert found.record["metrics"]["lpips_alex"]["weights"] == "d" * 64
    plain = evaluate(dark, mixed, set(dark.names), Options())
    assert "lpips_alex" not in plain.paired
    for metric, lower in (("lpips_vgg", True), ("latent_error", True), ("psnr", False)):
        assert lower_is_better(metric) == lower
    best = Pair("a", {"psnr": 30.0, "ssim": 0.5})
    assert damage(best) < damage(Pair("b", {"psnr": 20.0, "ssim": 0.4}))


def test_sets_that_have_no_pictures_or_not_all_of_them(tmp_path: Path) -> None:
    settings = Settings("f00d", {}, "F32")
    with Writer.start(tmp_path / "begun", settings, plan_of([("a", 0), ("b", 1)], ())):
        pass
    with pytest.raises(InputError, match="the set lacks 2 images"):
        open_source(tmp_path / "begun")
    plan = plan_of([("a", 0)], (), pictures=False)
    with Writer.start(tmp_path / "latents", settings, plan):
        pass
    with pytest.raises(InputError, match="a set without pictures"):
        open_source(tmp_path / "latents")


@pytest.mark.parametrize(("sizes", "warned"), [((3, 5), 3), ((5, 3), 3), ((4, 4), 0), ((5, 4), 0)])
def test_a_fid_of_few_pictures_on_either_side_is_biased(
    sizes: tuple[int, int], warned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluation.FEW_FOR_FID == 10_000
    monkeypatch.setattr(evaluation, "FEW_FOR_FID", 4)
    one, other = (_plain(tmp_path / str(at), range(9, 9 + n)) for at, n in enumerate(sizes))
    network: Any = _Means()
    found = evaluate(one, other, None, Options(Networks(inception=network))).warnings
    biased = [text.partition(" pictures")[0] for text in found if text.startswith("FID")]
    assert biased == ([f"FID of {warned}"] if warned else [])
    unequal = f"{sizes[0]} and {sizes[1]} pictures: distances of sets of two sizes are biased."
    assert (unequal in found) == (sizes[0] != sizes[1])


def test_the_record_tells_pictures_of_other_content_or_name_apart(tmp_path: Path) -> None:
    def content(folder: str, level: int, name: str) -> dict[str, str]:
        (tmp_path / folder).mkdir()
        Image.new("RGB", (16, 16), (level, level, level)).save(tmp_path / folder / f"{name}.png")
        return _evaluate((tmp_path / folder, tmp_path / folder), Options()).record["content"]

    first = content("a", 7, "x")
    assert first == content("b", 7, "x") and first["reference"] == first["candidate"]
    for other in (content("c", 8, "x"), content("d", 7, "y")):
        assert first["reference"] != other["reference"]


@pytest.mark.parametrize("count", [1, 2])
def test_scenes_are_judged_without_weights_from_outside(count: int, tmp_path: Path) -> None:
    scenes = sample_scenes(count, 5)
    for number, picture in enumerate(paint(scenes)):
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
    source = FolderPictures.open(tmp_path)
    held = list(embedded_metrics.held_out())
    source.prompts = {name: held[number] for number, name in enumerate(source.names)}
    ticks: list[int] = []
    options = Options(tick=lambda: ticks.append(1))
    found = evaluate(source, source, None, options)
    keys = {"prompt_accuracy_reference", "prompt_accuracy_candidate"}
    assert found.distribution.keys() == keys | ({"frechet_judge"} if count > 1 else set())
    assert ("frechet_judge" in found.record["metrics"]) == (count > 1)
    assert len(ticks) == count_ticks((source, source), None, options)
    ticks.clear()
    alone = evaluate_one(source, options).distribution
    assert alone.keys() == {"prompt_accuracy"} and alone["prompt_accuracy"].n == (count,)
    assert len(ticks) == count_ticks((source,), None, options) == count


def test_pictures_come_in_the_order_of_their_names_whatever_the_folders(tmp_path: Path) -> None:
    for name in ("b/2", "a-", "b", "a/1", "b/10", "B"):
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    source = open_source(tmp_path)
    assert list(source.names) == sorted(source.names) == [name for name, _ in source.pictures()]
    assert len(source.names) == 6


def test_only_vectors_are_taken_from_the_cache(tmp_path: Path) -> None:
    picture, network = np.zeros((4, 4, 3), np.uint8), _Means()
    table = feature_table([picture], 1, network, tmp_path)
    (file,) = tmp_path.rglob("*.npz")
    wrongs: list[dict[str, Any]] = [
        {}, {"pool3": np.zeros((1, 3), np.float32)}, {"pool3": np.zeros(3)},
    ]  # fmt: skip
    for number, wrong in enumerate(wrongs):
        file.write_bytes(npz_bytes(wrong))
        assert feature_table([picture], 1, network, tmp_path).keys() == table.keys()
        assert network.pictures == number + 2
    other = _Means()
    other.preprocess = "n0ne"
    feature_table([picture], 1, other, tmp_path)
    assert other.pictures == 1


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (15, [15]), (16, [16]), (33, [16, 16, 1])])
def test_pictures_are_judged_in_batches(count: int, sizes: list[int]) -> None:
    class Source:
        def pictures(self) -> Any:
            for number in range(2 * count):
                yield f"{number}", np.zeros((1, 1, 3), np.uint8)

    source: Any = Source()
    batches = list(evaluation._batches(source, {f"{2 * number}" for number in range(count)}))
    assert [len(batch) for batch in batches] == sizes
    names = [name for batch in batches for name, _ in batch]
    assert names == [f"{2 * number}" for number in range(count)]


def test_a_folder_of_too_many_pictures_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plain(tmp_path / "three", [1, 2, 3])
    for most, refused in ((3, False), (2, True)):
        monkeypatch.setattr("lydite.evaluate.pictures.MOST_PICTURES", most)
        with pytest.raises(InputError, match="more than 2 pic") if refused else nullcontext():
            open_source(tmp_path / "three")


def test_a_cache_that_cannot_be_written_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise FileError("no space")

    monkeypatch.setattr("lydite.evaluate.feature_table.write_atomic", full)
    picture, network = np.full((4, 4, 3), 7, np.uint8), _Means()
    assert feature_table([picture], 1, network, tmp_path)["pool3"].tolist() == [[7, 7, 7]]
    assert not list(tmp_path.rglob("*.npz"))
