"""The evaluation that ends `lydite quantize MODEL`: the same prompts, drawn with both models."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    if options["against"] is not None:
        described = read_description(Path(options["against"]))
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


def evaluate_export(
    model: "Model",
    opened: "CalibrationSet | None",
    work: Path,
    options: dict[str, Any],
    resume: str,
) -> None:
    """Draw with the original and with the result; evaluation.json is the record."""
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.store.set_file import read_description
    from lydite.cli.evaluate.calibration_sets import compare_sets
    from lydite.cli.evaluate.models import CANDIDATE, RECORD, draw_side, record_of
    from lydite.evaluate.evaluation import Evaluation, Options
    from lydite.evaluate.pictures import SetPictures
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
    compare_sets(
        reference,
        candidate,
        Options(),
        {"quiet": options["quiet"], "as_json": False, "html": None},
        lambda one, other: record_of(one, other, {"bits": None}),
        lambda evaluation: found.append(evaluation) or evaluation,
    )
    write_atomic(made / RECORD, found[0].to_json())
    with (
        closing(SetPictures.open(reference)) as one,
        closing(SetPictures.open(candidate)) as other,
    ):
        write_atomic(made / REPORT, page(found[0], one, other))


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
    from lydite.cli.evaluate.models import REFERENCE, draw_side, evaluated_images
    from lydite.core.request import Request
    from lydite.quantize.work import EVALUATION

    prompts = options["eval_prompts"] or options["prompts"]
    if prompts is None and opened is not None and model.name != embedded.NAME:
        prompts = work / "evaluation_prompts.txt"
        texts = list(dict.fromkeys(image.prompt for image in opened.plan.images))
        write_atomic(prompts, ("\n".join(texts) + "\n").encode())
    images = evaluated_images(
        {
            "prompts": prompts,
            "images": options["eval_images"] or EVALUATED,
            "seed": SEED_OF_EVALUATION,
        },
        model,
    )
    request, dtype = Request(""), "auto"
    if opened is not None:
        request, dtype = request_of(opened.settings.conditions)
    run = open_pipeline(model, dtype).plan(request)
    plan = plan_of(images, tuple(range(run.steps)))
    settings = WorkerOptions(1, None, options["quiet"])
    folder = work / EVALUATION / REFERENCE
    draw_side(folder, model, dtype, run.request, plan, settings, resume)
    return folder
