"""One pass over two sets of pictures: every metric that can be computed, and a record of how.

Nothing here depends on the clock or on a random seed, so the same pictures give the same record.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite import __version__
from lydite.core.errors import InputError, counted
from lydite.evaluate import embedded_metrics, paired
from lydite.evaluate.distributions import (
    Moments,
    frechet_distance,
    gaussian_mmd,
    inception_score,
    kernel_distance,
    precision_recall,
)
from lydite.evaluate.feature_table import BATCH, PictureNetwork, Table, feature_table
from lydite.evaluate.features import FeatureNetwork, Lpips
from lydite.evaluate.intervals import (
    ANY,
    FEWEST,
    FEWEST_BOOTSTRAP,
    RESAMPLES,
    Limits,
    Summary,
    growth,
    share_interval,
    summarize,
)
from lydite.evaluate.pictures import PictureSource, paired_pictures
from lydite.pipelines.picture import Pixels, pixel_hash

FEW_FOR_FID = 10_000  # pictures; below, FID is biased upwards by more than models differ
WORST = 20  # pairs that are listed
# What values a metric can have: an interval does not go beyond.
LIMITS: Mapping[str, Limits] = {
    "psnr": (0.0, paired.MOST_PSNR),
    "ssim": (-1.0, 1.0),
    "ms_ssim": (0.0, 1.0),
    "lpips_alex": (0.0, inf),
    "lpips_vgg": (0.0, inf),
    "latent_error": (0.0, inf),
    "clip_score": (0.0, 100.0),
}
FRECHET_JUDGE, GROWTH = "frechet_judge", "growth"
MEANINGS = {  # of figures whose names say too little
    FRECHET_JUDGE: "Fréchet distance between the two sets, by features of the network that judges "
    "the embedded model's pictures; 0 where they are distributed alike.",
    GROWTH: "the error at a step over that at the step before, fitted over all steps",
}
DAMAGE = ("lpips_alex", "lpips_vgg", "ms_ssim", "ssim", "psnr")  # what pairs are sorted by


@dataclass(frozen=True)
class Networks:
    """Feature networks that the user has weights of."""

    inception: FeatureNetwork | None = None
    clip: FeatureNetwork | None = None
    lpips: Sequence[Lpips] = ()


class Pair(msgspec.Struct, frozen=True):
    """One pair of pictures and its metrics."""

    name: str
    metrics: dict[str, float]
    prompt: str | None = None
    seed: int | None = None


class Distance(msgspec.Struct, frozen=True):
    """A number for two sets of pictures, or for one of them."""

    value: float
    n: tuple[int, ...]  # pictures: of the reference and the candidate, or of one set
    std: float | None = None
    ci95: tuple[float, float] | None = None


class StepError(msgspec.Struct, frozen=True):
    """The relative error of the latents at the beginning of a step."""

    step: int
    error: Summary


class Evaluation(msgspec.Struct, frozen=True):
    """All figures of one comparison."""

    paired: dict[str, Summary]
    distribution: dict[str, Distance]
    steps: list[StepError]
    growth: float | None  # of the latents' error from one step to the next
    worst: list[Pair]  # none whose pictures are identical
    identical: int  # pairs without any difference
    warnings: list[str]
    record: dict[str, Any]
    flat_field: list[dict[str, Any]] = []

    def to_json(self) -> bytes:
        """The same evaluation gives the same bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


@dataclass
class Options:
    """What is computed, and a function to call as it proceeds."""

    networks: Networks = field(default_factory=Networks)
    cache: Path | None = None  # of features
    tick: Callable[[], None] = lambda: None  # after each picture of each pass


def count_ticks(sources: Sequence[PictureSource], names: set[str] | None, options: Options) -> int:
    """How often `tick` is called for two sets, or for one alone: the length of a progress bar."""
    sides = [_Set(source, _chosen(source, names), options) for source in sources]
    counts, two = [len(side.names) for side in sides], len(sides) > 1
    clip = options.networks.clip is not None and (two or bool(sides[0].prompts))
    passes = int(options.networks.inception is not None) + int(clip)
    if all(side.shows_scenes for side in sides):
        passes += 1 + int(two and min(counts) > 1)
    return len(names or ()) + passes * sum(counts)


def evaluate(
    reference: PictureSource,
    candidate: PictureSource,
    names: set[str] | None,
    options: Options,
    *,
    latent_errors: NDArray[np.float64] | None = None,
    kept_steps: Sequence[int] = (),
    seeds: Mapping[str, int] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Compare two sets of pictures; `names` of the pairs, or None where there are none.

    `latent_errors` (images, steps) are relative errors at the beginning of `kept_steps`.
    """
    warnings: list[str] = []
    measured = _Pairs()
    if names is not None:
        measured = _measure_pairs(reference, candidate, names, options, seeds or {})
    pairs = measured.pairs
    sides = {
        side: _Set(source, _chosen(source, names), options)
        for side, source in (("reference", reference), ("candidate", candidate))
    }
    distribution = _measure_sets(sides, options, warnings)
    summaries = {
        metric: summarize([pair.metrics[metric] for pair in pairs], LIMITS.get(metric, ANY))
        for metric in (pairs[0].metrics if pairs else ())
    }
    steps: list[StepError] = []
    if latent_errors is not None:
        steps = [
            StepError(step, summarize(latent_errors[:, column], LIMITS["latent_error"]))
            for column, step in enumerate(kept_steps)
        ]
        summaries["latent_error"] = steps[-1].error
    warnings += [*reference.notes(), *candidate.notes()]
    counts = len(reference.names), len(candidate.names)
    if 0 < len(pairs) < FEWEST:
        warnings.append(_too_few(len(pairs)))
    if names is None and counts[0] != counts[1]:
        warnings.append(
            f"{counts[0]} and {counts[1]} pictures: distances of sets of two sizes are biased."
        )
    return Evaluation(
        paired=summaries,
        distribution=distribution,
        steps=steps,
        growth=growth([step.error.mean for step in steps]),
        worst=sorted(measured.different, key=damage, reverse=True)[:WORST],
        identical=len(measured.identical),
        warnings=warnings,
        record={
            "lydite": __version__,
            "pictures": {"reference": counts[0], "candidate": counts[1], "pairs": len(pairs)},
            "content": measured.hashes,
            "metrics": _descriptions(options.networks, summaries, distribution)
            | {name: f"left out: {reason}" for name, reason in measured.missing.items()},
            **(record or {}),
        },
    )


def _too_few(count: int) -> str:
    return (
        f"{counted(count, 'picture')}: too few for a 95 % interval. Draw at least {FEWEST}; 32 or "
        "more are better."
    )


def identical_text(count: int) -> str:
    """How many pairs have no difference at all."""
    return f"{counted(count, 'pair')} {'is' if count == 1 else 'are'} identical."


def damage(pair: Pair) -> float:
    """How far apart a pair is, by the best metric it has."""
    metric = next(name for name in DAMAGE if name in pair.metrics)
    value = pair.metrics[metric]
    return value if lower_is_better(metric) else -value


def lower_is_better(metric: str) -> bool:
    """Whether a paired metric is an error; the others are similarities."""
    return metric.startswith(("lpips", "latent_error"))


@dataclass
class _Pairs:
    """What was measured of pairs of pictures."""

    pairs: list[Pair] = field(default_factory=list[Pair])
    identical: set[str] = field(default_factory=set[str])  # names
    hashes: dict[str, str] = field(default_factory=dict[str, str])  # of all pictures of a side
    missing: dict[str, str] = field(default_factory=dict[str, str])  # metrics, and why

    @property
    def different(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.name not in self.identical]


def _measure_pairs(
    reference: PictureSource,
    candidate: PictureSource,
    names: set[str],
    options: Options,
    seeds: Mapping[str, int],
) -> _Pairs:
    prompts = {**reference.prompts, **candidate.prompts}
    measured = _Pairs()
    pairs = measured.pairs
    totals = {"reference": hashlib.sha256(), "candidate": hashlib.sha256()}
    metrics: dict[str, Callable[[Pixels, Pixels], float]] = {}
    smallest = 0  # pixels of a side
    for name, one, other in paired_pictures(reference, candidate, names):
        for total, pixels in zip(totals.values(), (one, other), strict=True):
            total.update(f"{name} {pixel_hash(pixels)}\n".encode(errors="surrogateescape"))
        if not pairs or min(one.shape[:2]) < smallest:
            smallest = min(one.shape[:2])
            metrics, measured.missing = _paired_metrics(smallest, options.networks)
        if np.array_equal(one, other):
            measured.identical.add(name)
        values = {metric: compute(one, other) for metric, compute in metrics.items()}
        pairs.append(Pair(name, values, prompts.get(name), seeds.get(name)))
        options.tick()
    for pair in pairs:  # of larger pictures
        for metric in pair.metrics.keys() - metrics.keys():
            del pair.metrics[metric]
    measured.hashes = {side: total.hexdigest() for side, total in totals.items()}
    return measured


def _paired_metrics(
    side: int, networks: Networks
) -> tuple[dict[str, Callable[[Pixels, Pixels], float]], dict[str, str]]:
    """The metrics of pictures whose shorter side has so many pixels; those left out, and why."""
    missing: dict[str, str] = {}
    metrics: dict[str, Callable[[Pixels, Pixels], float]] = {"psnr": paired.psnr}
    for name, compute, smallest in (
        ("ssim", paired.ssim, paired.SMALLEST_SSIM),
        ("ms_ssim", paired.ms_ssim, paired.SMALLEST_MS_SSIM),
    ):
        if side >= smallest:
            metrics[name] = compute
        else:
            missing[name] = f"needs pictures of at least {smallest} pixels a side."
    for lpips in networks.lpips:
        metrics[f"lpips_{lpips.net}"] = lambda one, other, lpips=lpips: float(
            lpips(one[None], other[None])[0]
        )
    return metrics, missing


@dataclass
class _Set:
    """One side of a comparison: its pictures, and the features of them."""

    source: PictureSource
    names: tuple[str, ...]
    options: Options

    @property
    def prompts(self) -> list[str]:
        """Of all pictures, or none."""
        known = self.source.prompts
        return [known[name] for name in self.names] if known else []

    def features(self, network: PictureNetwork) -> Table:
        wanted = set(self.names)
        pixels = (pixels for name, pixels in self.source.pictures() if name in wanted)
        return feature_table(pixels, len(wanted), network, self.options.cache, self.options.tick)

    @property
    def shows_scenes(self) -> bool:
        """Whether these are pictures of the embedded model's kind."""
        prompts = self.prompts
        if not prompts or not embedded_metrics.are_captions(prompts):
            return False
        return embedded_metrics.fits(next(self.source.pictures())[1])

    def right(self) -> list[bool]:
        """For each picture whose prompt says a known scene, whether it shows all of it."""
        known, wanted, prompts = embedded_metrics.held_out(), set(self.names), self.source.prompts
        judge, right = embedded_metrics.open_judge(), list[bool]()
        for batch in _batches(self.source, wanted):
            judged = [
                (pixels, known[prompts[name]]) for name, pixels in batch if prompts[name] in known
            ]
            if judged:
                pixels, says = zip(*judged, strict=True)
                right += embedded_metrics.count_right(judge, np.stack(pixels), says)
            for _ in batch:
                self.options.tick()
        return right


def evaluate_one(source: PictureSource, options: Options) -> Evaluation:
    """The scores that a set of pictures has by itself."""
    one = _Set(source, source.names, options)
    distribution: dict[str, Distance] = {}
    if (network := options.networks.inception) is not None:
        score = _inception_score(one.features(network))
        distribution[f"inception_score_{network.preprocess}"] = score
    if (network := options.networks.clip) is not None and one.prompts:
        distribution["clip_score"] = _clip_score(one.features(network), network, one.prompts)
    if one.shows_scenes and (right := one.right()):
        distribution["prompt_accuracy"] = _share(right)
    record = {
        "lydite": __version__,
        "pictures": len(one.names),
        "metrics": _descriptions(options.networks, {}, distribution),
    }
    warnings = source.notes()
    if len(one.names) < FEWEST and distribution:
        warnings.append(_too_few(len(one.names)))
    return Evaluation({}, distribution, [], None, [], 0, warnings, record)


def _measure_sets(
    sides: Mapping[str, _Set], options: Options, warnings: list[str]
) -> dict[str, Distance]:
    """Distances between two sets, with every feature network that is there, and scores of each."""
    result: dict[str, Distance] = {}
    counts = tuple(len(side.names) for side in sides.values())
    if (network := options.networks.inception) is not None:
        tables = {name: side.features(network) for name, side in sides.items()}
        result |= _inception_distances(tables, network.preprocess)
        if min(counts) < FEW_FOR_FID:
            warnings.append(
                f"FID of {counted(min(counts), 'picture')} is biased upwards: compare it only with "
                f"FIDs of as many pictures, or draw {FEW_FOR_FID:,}. KID has no such bias."
            )
    if (network := options.networks.clip) is not None:
        tables = {name: side.features(network) for name, side in sides.items()}
        result |= _clip_distances(tables)
        for name, side in sides.items():
            if side.prompts:
                result[f"clip_score_{name}"] = _clip_score(tables[name], network, side.prompts)
    if all(side.shows_scenes for side in sides.values()):
        judge = embedded_metrics.JudgeFeatures()
        if min(counts) > 1:
            one, other = (Moments.of(side.features(judge)["judge"]) for side in sides.values())
            result[FRECHET_JUDGE] = Distance(frechet_distance(one, other), counts)
        for name, side in sides.items():
            if right := side.right():
                result[f"prompt_accuracy_{name}"] = _share(right)
    return result


def _share(right: Sequence[bool]) -> Distance:
    interval = share_interval(right) if len(right) >= FEWEST else None
    return Distance(float(np.mean(right)), (len(right),), ci95=interval)


def _chosen(source: PictureSource, names: set[str] | None) -> tuple[str, ...]:
    return source.names if names is None else tuple(n for n in source.names if n in names)


def _batches(source: PictureSource, names: set[str]) -> Iterator[list[tuple[str, Pixels]]]:
    batch: list[tuple[str, Pixels]] = []
    for name, pixels in source.pictures():
        if name in names:
            batch.append((name, pixels))
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _inception_distances(tables: Mapping[str, Table], resize: str) -> dict[str, Distance]:
    one, other = tables["reference"], tables["candidate"]
    n = len(one["pool3"]), len(other["pool3"])
    result: dict[str, Distance] = {}
    if min(n) > 1:
        for name, feature in ("fid", "pool3"), ("sfid", "spatial"):
            value = frechet_distance(*(_moments(table[feature]) for table in (one, other)))
            result[f"{name}_{resize}"] = Distance(value, n)
        result[f"kid_{resize}"] = Distance(kernel_distance(one["pool3"], other["pool3"]), n)
    if min(n) > 3:
        precision, recall = precision_recall(other["pool3"], one["pool3"])
        result[f"precision_{resize}"] = Distance(precision, n)
        result[f"recall_{resize}"] = Distance(recall, n)
    for side, table in tables.items():
        result[f"inception_score_{side}_{resize}"] = _inception_score(table)
    return result


def _inception_score(table: Table) -> Distance:
    mean, std = inception_score(table["logits"])
    return Distance(mean, (len(table["logits"]),), std)


def _clip_distances(tables: Mapping[str, Table]) -> dict[str, Distance]:
    one, other = tables["reference"]["image"], tables["candidate"]["image"]
    n = len(one), len(other)
    if min(n) < 2:
        return {}
    return {
        "clip_fid": Distance(frechet_distance(_moments(one), _moments(other)), n),
        "cmmd": Distance(gaussian_mmd(one, other), n),
    }


def _moments(features: NDArray[Any]) -> Moments:
    """Of a table, read in pieces."""
    moments = Moments.empty(features.shape[1])
    for first in range(0, len(features), 1024):
        moments.add(features[first : first + 1024])
    return moments


def _clip_score(table: Table, network: FeatureNetwork, prompts: Sequence[str]) -> Distance:
    """100 × the cosine of picture and prompt, not below 0."""
    a = np.asarray(table["image"], np.float64)
    b = np.asarray(network.encode_text(prompts), np.float64)
    cosines = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    summary = summarize((100 * cosines).clip(0, 100), LIMITS["clip_score"])
    return Distance(summary.mean, (summary.n,), summary.std, summary.ci95)


def _descriptions(
    networks: Networks, summaries: Mapping[str, Summary], distribution: Mapping[str, Distance]
) -> dict[str, Any]:
    """How each metric was computed."""
    known: dict[str, Any] = {
        "psnr": {"peak": 255, "channels": "RGB", "identical_pairs": paired.MOST_PSNR},
        "ssim": {"window": "Gaussian, sigma 1.5, 11 taps", "border": "left out"},
        "ms_ssim": {"scales": len(paired.SCALES), "window": "as ssim"},
        "latent_error": "norm of the difference over the norm of the reference, last kept step",
        "ci95": f"of the mean: bootstrap-t, {RESAMPLES} resamples; of fewer than "
        f"{FEWEST_BOOTSTRAP} values Student's t; of fewer than {FEWEST} none. It ends where the "
        "values of a metric can end",
    }
    described = {name: known[name] for name in summaries if name in known}
    described["ci95"] = known["ci95"]
    for lpips in networks.lpips:
        described[f"lpips_{lpips.net}"] = {"network": lpips.name, "weights": lpips.digest}
    for network in (networks.inception, networks.clip):
        if network is not None:
            described[network.name] = {
                "weights": network.digest,
                "preprocess": network.preprocess,
            }
    if FRECHET_JUDGE in distribution:
        described[FRECHET_JUDGE] = embedded_metrics.JudgeFeatures.name
    return described


def require_something(names: set[str] | None, options: Options) -> None:
    """Refuse a comparison in which nothing would be measured."""
    networks = options.networks
    if names is None and networks.inception is None and networks.clip is None:
        raise InputError(
            "--unpaired compares features of the sets; give --inception FILE or --clip FOLDER."
        )
