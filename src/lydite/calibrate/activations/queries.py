"""Queries of a statistics file: ranges over the steps, outlier channels, what varies most."""

import re
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.activations.file import open_statistics, summary_in

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
    with open_statistics(path) as connection:
        summary = {**summary_in(connection), "conditions": _conditions(connection)}
        bands = "SELECT band, min(step) FROM band GROUP BY band"
        firsts: dict[int, int] = dict(connection.execute(bands).fetchall())
        channels = _channels(connection)
        rows = connection.execute(
            f"SELECT place.id, layer, place.place, band, {_columns()} FROM statistic "
            "JOIN place ON place.id = statistic.place ORDER BY layer, place.place, band"
        ).fetchall()
        found: dict[int, list[Any]] = {}
        for row in rows:
            found.setdefault(row[0], []).append(row)
        curves: list[Curve] = []
        for number, lines in found.items():
            _, layer, place, *_ = lines[0]
            steps = tuple(firsts[line[3]] for line in lines)
            table = np.array([line[4:] for line in lines], np.float64).T
            values: dict[str, Any] = dict(zip((*COLUMNS, *QUANTILES), table, strict=True))
            curves.append(Curve(layer, place, steps, values, channels[number]))
        if not curves:
            raise ValueError("no layer in it")
    return curves, summary


def distinct(curves: list[Curve]) -> list[Curve]:
    """Places that see the very same values as one: a linear's input is often another's."""
    found: dict[bytes, Curve] = {}
    for curve in curves:
        seen = b"".join(each.tobytes() for each in (*curve.values.values(), curve.channels))
        known = found.get(seen)
        found[seen] = replace(known, alike=known.alike + 1) if known else curve
    return list(found.values())


def _conditions(connection: sqlite3.Connection) -> dict[str, Any]:
    about = connection.execute("SELECT value FROM about WHERE name = 'collected'").fetchone()
    return msgspec.json.decode(about[0])["settings"]["conditions"]


def _columns() -> str:
    return ", ".join(f"statistic.{name}" for name in (*COLUMNS, *QUANTILES))


def _channels(connection: sqlite3.Connection) -> dict[int, NDArray[np.float64]]:
    """The largest magnitude of each channel of each place, over all bands."""
    rows = connection.execute(
        "SELECT place, max(max(abs(min), abs(max))) FROM channel "
        "GROUP BY place, channel ORDER BY place, channel"
    )
    found: dict[int, list[float]] = {}
    for place, absmax in rows:
        found.setdefault(place, []).append(absmax)
    return {place: np.array(values) for place, values in found.items()}
