"""Two calibration sets of one plan, drawn by two models: the errors of latents over the steps."""

from collections.abc import Container
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.settings import canonical
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.dtypes import widen
from lydite.core.errors import InputError, at, shown

REFERENCE, CANDIDATE, RECORD = "reference", "candidate", "evaluation.json"  # in its folder
OWN = ("compute",)  # conditions in which a candidate may differ from its reference


def check_comparable(reference: CalibrationSet, candidate: CalibrationSet) -> None:
    """Refuse sets of other prompts, seeds or settings: their difference is not the model's."""
    if reference.plan.images != candidate.plan.images:
        raise InputError(
            f"{at(reference.folder)} and {at(candidate.folder)}: other prompts or seeds; expected "
            "the same images in both sets."
        )
    one, other = (
        {name: value for name, value in opened.settings.conditions.items() if name not in OWN}
        for opened in (reference, candidate)
    )
    for name in sorted(one.keys() | other.keys()):
        if canonical(one.get(name)) != canonical(other.get(name)):
            raise InputError(
                f"{at(reference.folder)} and {at(candidate.folder)}: {name} is "
                f"{shown(one.get(name))} and {shown(other.get(name))}; expected the same settings."
            )


def latent_errors(
    reference: CalibrationSet,
    candidate: CalibrationSet,
    images: Container[int | None] | None = None,
) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """Steps that both keep, and |candidate − reference| / |reference| (images, steps) there.

    A sample is the latent at the beginning of its step, so step 0 is the noise, without an error.
    `images` are the numbers of those that are compared; None: all.
    """
    steps = tuple(sorted(set(reference.plan.steps) & set(candidate.plan.steps)))
    rows: list[list[float]] = []
    samples = (
        groupby(
            (
                row
                for row in opened.rows("sample")
                if row.step in steps and (images is None or row.image in images)
            ),
            lambda row: row.image,
        )
        for opened in (reference, candidate)
    )
    for (number, ours), (other_number, theirs) in zip(*samples, strict=True):
        assert number == other_number, "sets are in the order of their images"
        errors: list[float] = []
        for one, other in zip(ours, theirs, strict=True):
            x, y = (
                widen(opened.read(row)["x"]).astype(np.float64)
                for opened, row in ((reference, one), (candidate, other))
            )
            if x.shape != y.shape:
                raise InputError(
                    f"image {number}: latents are {x.shape} and {y.shape}; expected one shape."
                )
            errors.append(float(np.linalg.norm(y - x) / (np.linalg.norm(x) or 1.0)))
        rows.append(errors)
    return steps, np.array(rows, np.float64).reshape(len(rows), len(steps))
