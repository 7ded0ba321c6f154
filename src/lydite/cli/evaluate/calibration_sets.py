"""Two calibration sets of one plan, compared and printed."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lydite.cli.evaluate.metric_options import print_evaluation

if TYPE_CHECKING:
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.evaluate.evaluation import Evaluation, Options


def compare_sets(
    reference: Path,
    candidate: Path,
    metrics: "Options",
    options: dict[str, Any],
    record: "Callable[[CalibrationSet, CalibrationSet], dict[str, Any]] | None" = None,
    finish: "Callable[[Evaluation], Evaluation]" = lambda evaluation: evaluation,
) -> None:
    """Measure the pairs of two sets; `finish` adds to the result before it is printed."""
    from lydite.cli.progress import StepBar
    from lydite.evaluate.evaluation import count_ticks, evaluate
    from lydite.evaluate.latent_errors import check_comparable, latent_errors
    from lydite.evaluate.pictures import SetPictures

    with closing(SetPictures.open(reference)) as one, closing(SetPictures.open(candidate)) as other:
        check_comparable(one.opened, other.opened)
        steps, errors = latent_errors(one.opened, other.opened)
        names = set(one.names)
        total = count_ticks((one, other), names, metrics)
        quiet = options["quiet"] or options["as_json"]
        with StepBar(total, quiet=quiet, unit="picture") as bar:
            metrics.tick = bar.advance
            sides = {"reference": reference.name, "candidate": candidate.name}
            evaluation = evaluate(
                one,
                other,
                names,
                metrics,
                latent_errors=errors if steps else None,
                kept_steps=steps,
                seeds={f"{image.number:06}": image.seed for image in one.opened.plan.images},
                record=record(one.opened, other.opened) if record else sides,
            )
        print_evaluation(finish(evaluation), one, other, options)
