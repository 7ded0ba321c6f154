"""The evaluation that ends `lydite quantize MODEL`: the same prompts, drawn with both models."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lydite import embedded
from lydite.cli.calibrate.draw_missing import WorkerOptions, absolute_model
from lydite.core.errors import InputError
from lydite.core.files import write_atomic

if TYPE_CHECKING:
    from lydite.calibrate.run import Model
    from lydite.calibrate.store.reader import CalibrationSet

EVALUATED = 32  # pictures
REPORT = "report.html"
SEED_OF_EVALUATION = 1_000_000  # apart from the seeds of calibration


def check_evaluation(model: "Model", options: dict[str, Any]) -> None:
    """Refuse what the evaluation at the end could not be done with."""
    from lydite.calibrate.model_session import open_pipeline, require_model
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.store.set_file import read_description
    from lydite.evaluate.pictures import SetPictures

    if options["against"] is not None:
        folder = Path(options["against"])
        described = read_description(folder)
        SetPictures.open(folder).close()  # complete, with pictures
        pipeline = open_pipeline(model, request_of(described.settings.conditions)[1])
        pipeline.model.prepare()
        require_model(described.settings, pipeline)
        pipeline.model.unload()
        return
    known = (options[name] for name in ("set_folder", "prompts", "eval_prompts"))
    if model.name != embedded.NAME and not any(known):
        raise InputError(
            "no prompts: give --prompts FILE or --set SET. Only the embedded model has its own."
        )


def check_prompts(options: dict[str, Any]) -> None:
    """Read the files of prompts: an error in one is found before the work."""
    from lydite.calibrate.prompts import read_prompts

    for name in ("prompts", "eval_prompts"):
        if options[name] is not None:
            read_prompts(options[name])


def shared_prompts(
    model: "Model", opened: "CalibrationSet | None", options: dict[str, Any]
) -> str | None:
    """A sentence where prompts of the calibration set are used in the evaluation too."""
    from lydite.calibrate.store.set_file import read_description

    if opened is None:
        return None
    if options["against"] is not None:
        images = read_description(Path(options["against"])).plan.images
        evaluated = {image.prompt for image in images}
    else:
        evaluated = {prompt for prompt, _ in _evaluated_images(model, opened, options)}
    shared = evaluated & {image.prompt for image in opened.plan.images}
    if not shared:
        return None
    return (
        f"prompts of the evaluation are in the calibration set too ({len(shared)} of "
        f"{len(evaluated)}, with other seeds): the figures may be a little too good. Give "
        "--eval-prompts FILE with prompts that are not in it."
    )


def evaluate_export(
    model: "Model",
    opened: "CalibrationSet | None",
    work: Path,
    options: dict[str, Any],
    resume: str,
    shared: str | None,
) -> None:
    """Draw with the original and with the result; evaluation.json is the record.

    `shared` is what `shared_prompts` said, which the record repeats.
    """
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.store.set_file import read_description
    from lydite.cli.evaluate.calibration_sets import compare_sets
    from lydite.cli.evaluate.models import CANDIDATE, RECORD, draw_side, record_of
    from lydite.evaluate.evaluation import Evaluation, Options
    from lydite.evaluate.pictures import SetPictures
    from lydite.quantize.provenance import read_provenance
    from lydite.quantize.work import EVALUATION, MODEL
    from lydite.report.evaluation import page

    out, made = work / EVALUATION, work / MODEL
    drawn = options["against"] or _draw_original(model, opened, work, options, resume)
    reference = Path(drawn)
    candidate, described = out / CANDIDATE, read_description(reference)
    request, dtype = request_of(described.settings.conditions)
    settings = WorkerOptions(1, None, options["quiet"])
    exported = absolute_model(str(made), None)
    draw_side(candidate, exported, dtype, request, described.plan, settings, resume)
    found: list[Evaluation] = []

    def recorded(one: "CalibrationSet", other: "CalibrationSet") -> dict[str, Any]:
        record = record_of(one, other, {"bits": None})
        record[CANDIDATE]["model"] = options["out"].name  # not the folder of work
        return record

    compare_sets(
        reference,
        candidate,
        Options(),
        {"quiet": options["quiet"], "as_json": False, "html": None},
        recorded,
        lambda evaluation: found.append(evaluation) or evaluation,
    )
    (evaluation,) = found
    if shared:
        warnings = [*evaluation.warnings, shared]
        evaluation = msgspec.structs.replace(evaluation, warnings=warnings)
    write_atomic(made / RECORD, evaluation.to_json())
    with (
        closing(SetPictures.open(reference)) as one,
        closing(SetPictures.open(candidate)) as other,
    ):
        title = f"{options['out'].name}: {read_provenance(made).summary}"
        write_atomic(made / REPORT, page(evaluation, one, other, title=title))


def _draw_original(
    model: "Model",
    opened: "CalibrationSet | None",
    work: Path,
    options: dict[str, Any],
    resume: str,
) -> Path:
    """Pictures of the original with the settings of the calibration set."""
    from lydite.calibrate.model_session import open_pipeline
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.settings import plan_of
    from lydite.cli.evaluate.models import REFERENCE, draw_side
    from lydite.core.request import Request
    from lydite.quantize.work import EVALUATION

    images = _evaluated_images(model, opened, options)
    request, dtype = Request(""), "auto"
    if opened is not None:
        request, dtype = request_of(opened.settings.conditions)
    run = open_pipeline(model, dtype).plan(request)
    plan = plan_of(images, tuple(range(run.steps)))
    settings = WorkerOptions(1, None, options["quiet"])
    folder = work / EVALUATION / REFERENCE
    draw_side(folder, model, dtype, run.request, plan, settings, resume)
    return folder


def _evaluated_images(
    model: "Model", opened: "CalibrationSet | None", options: dict[str, Any]
) -> list[tuple[str, int]]:
    """Prompts with their seeds: of a file, of the embedded model, or else of the set."""
    from lydite.calibrate.prompts import Prompts
    from lydite.cli.evaluate.models import evaluated_images

    prompts, count = (
        options["eval_prompts"] or options["prompts"],
        options["eval_images"] or EVALUATED,
    )
    if prompts is None and opened is not None and model.name != embedded.NAME:
        texts = dict.fromkeys(image.prompt for image in opened.plan.images)
        return Prompts(tuple(texts)).images(count, SEED_OF_EVALUATION)
    return evaluated_images(
        {"prompts": prompts, "images": count, "seed": SEED_OF_EVALUATION}, model
    )
