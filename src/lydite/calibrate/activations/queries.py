"""Queries of a statistics file: ranges over the steps, outlier channels, what varies most."""

import re
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.activations.file import open_statistics, statistic_row
from lydite.calibrate.activations.moments import Moments

GELU = ".net.2"  # the linear after a GELU
MODULATION = re.compile(r"time_text_embed\..*|(.*\.)?norm\w*\.linear")
COLUMNS = ("min", "max", "absmax", "mean", "variance", "zero", "negative")
QUANTILES = ("p0_1", "p1", "p50", "p99", "p99_9")


@dataclass(frozen=True, eq=False)
class Curve:
    """One place over the bands; each statistic has a value for each band."""

    layer: str
    place: str
    steps: tuple[int, ...]  # the first of each band
    values: dict[str, NDArray[np.float64]]
    channels: NDArray[np.float64]  # the largest magnitude of each channel over all bands
    alike: int = 0  # other places that see the very same values

    @property
    def name(self) -> str:
        """Short, for people."""
        more = f" +{self.alike}" if self.alike else ""
        return f"{self.layer.removeprefix('transformer_blocks.')} {self.place}{more}"

    @property
    def spread(self) -> NDArray[np.float64]:
        """From the 0.1 % to the 99.9 % quantile: one outlier does not decide it."""
        return self.values["p99_9"] - self.values["p0_1"]

    @property
    def drift(self) -> float:
        """The widest spread over the narrowest: what one range for all steps costs."""
        least = float(self.spread.min())
        return float(self.spread.max()) / least if least > 0 else 1.0

    @property
    def outlier(self) -> float:
        """The largest channel over the median one."""
        middle = float(np.median(self.channels))
        return float(self.channels.max()) / middle if middle > 0 else 1.0

    @property
    def after_gelu(self) -> bool:
        """Whether this is what the second linear of a feed-forward takes."""
        return self.layer.endswith(GELU) and self.place == "in"

    @property
    def modulates(self) -> bool:
        """Whether the layer sees timestep and pooled text alone, and no picture."""
        return bool(MODULATION.fullmatch(self.layer))


def read_curves(path: Path) -> tuple[list[Curve], dict[str, Any]]:
    """Every place of a file, and what the file says of itself and of the set's conditions."""
    with open_statistics(path) as file:
        conditions = file.provenance.settings.conditions
        summary = {**msgspec.to_builtins(file.summary), "conditions": conditions}
        firsts: dict[int, int] = {}
        for step, band in sorted(file.provenance.bands.items()):
            firsts.setdefault(band, step)
        curves: list[Curve] = []
        by_place = groupby(file.moments(), key=lambda item: item[0][:2])
        for (layer, place), items in by_place:
            curves.append(_curve(layer, place, firsts, [(key[2], m) for key, m in items]))
    return curves, summary


def _curve(
    layer: str, place: str, firsts: dict[int, int], bands: list[tuple[int, Moments]]
) -> Curve:
    steps = tuple(firsts[band] for band, _ in bands)
    table = np.array([statistic_row(moments)[1:] for _, moments in bands], np.float64).T
    values: dict[str, Any] = dict(zip((*COLUMNS, *QUANTILES), table, strict=True))
    channels = np.max([moments.absmax for _, moments in bands], axis=0)
    return Curve(layer, place, steps, values, np.asarray(channels, np.float64))


def distinct(curves: list[Curve]) -> list[Curve]:
    """Places that see the very same values as one: a linear's input is often another's."""
    found: dict[bytes, Curve] = {}
    for curve in curves:
        seen = b"".join(each.tobytes() for each in (*curve.values.values(), curve.channels))
        known = found.get(seen)
        found[seen] = replace(known, alike=known.alike + 1) if known else curve
    return list(found.values())
