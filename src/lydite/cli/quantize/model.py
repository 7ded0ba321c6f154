"""`lydite quantize MODEL`: calibrate, round, export, evaluate."""

import os
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite import embedded
from lydite.cli.calibrate.draw_missing import StopRequest, WorkerOptions, absolute_model
from lydite.cli.calibrate.model_options import SampleBar, note_on_stop
from lydite.cli.progress import StepBar
from lydite.cli.request_options import components_option, device_option, typed_arguments
from lydite.core.errors import FileError, InputError, at, is_unicode
from lydite.core.files import size_text, write_atomic
from lydite.weights.quantize import BITS, FORMATS

if TYPE_CHECKING:
    from lydite.calibrate.run import Model
    from lydite.calibrate.store.index import Row
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.pipelines.pipeline import Pipeline
    from lydite.quantize.plan import Plan
    from lydite.quantize.provenance import Provenance
    from lydite.quantize.run import BlockResult, Settings
    from lydite.quantize.work import Work

METHODS = (
    *("rtn", "hqq", "awq", "gptq", "adaround", "joint", "taqdit", "smoothquant", "ptq4dit"),
    "dwq",  # rtn, then tuned
)
SET_IMAGES = 16  # of a calibration set that is made here
EVALUATED = 32  # pictures
SET_SEED = 4242  # of the embedded model's own prompts
REPORT = "report.html"
SEED_OF_EVALUATION = 1_000_000  # apart from the seeds of calibration
ITERATIONS, TUNED = 1000, 200


@click.command("model")
@click.argument("model", metavar="MODEL")
@click.option("--method", type=click.Choice(METHODS), default="gptq", show_default=True,
              help="rtn and hqq need no data; gptq takes minutes; adaround, joint, taqdit and "
                   "ptq4dit learn, and take longest.")  # fmt: skip
@click.option("--bits", type=click.Choice([str(bits) for bits in BITS]), default="4",
              show_default=True, help="Of the linears inside the blocks.")  # fmt: skip
@click.option("--group", type=click.Choice(("32", "64", "128", "channel")), default="64",
              show_default=True, help="Inputs that share a scale.")  # fmt: skip
@click.option("--format", type=click.Choice(tuple(FORMATS)), default="affine", show_default=True,
              help="mxfp4, mxfp8 and nvfp4 are floating-point formats of MLX, with bits and groups "
                   "of their own; for rtn and gptq.")  # fmt: skip
@click.option("--act-bits", type=click.IntRange(2, 8), metavar="N",
              help="Also round the inputs of these linears, one static range each: simulated, MLX "
                   "has no such products.")  # fmt: skip
@click.option("--act-groups", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Ranges of these inputs for N groups of steps, not one for all.")  # fmt: skip
@click.option("--quantize-input", is_flag=True,
              help="Also round these inputs to --format nvfp4 or mxfp8, as such products of MLX do "
                   "(mx.qqmm); simulated on a device without them.")  # fmt: skip
@click.option("--bpw", type=click.FloatRange(2.5, 9), metavar="X",
              help="Bits per weight on average, by measured sensitivity; instead of "
                   "--bits.")  # fmt: skip
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Bits of each layer, from `lydite quantize plan --save`.")  # fmt: skip
@click.option("--convolutions", is_flag=True,
              help="Also those inside the blocks of a U-Net, rounded to nearest.")  # fmt: skip
@click.option("--rank", type=click.IntRange(1, 256), metavar="N",
              help="Of a branch in 16 bits beside each weight, as in SVDQuant.")  # fmt: skip
@click.option("--tune", type=click.IntRange(1), metavar="N",
              help="Then N iterations of DWQ: scales, offsets and biases are tuned by distillation "
                   f"through the whole network. --method dwq is rtn with {TUNED}.")  # fmt: skip
@click.option("--set", "set_folder", type=click.Path(path_type=Path), metavar="SET",
              help="A calibration set of MODEL. By default a small one is drawn.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="For a set that is drawn here, and for the evaluation where --eval-prompts is "
                   "not given.")  # fmt: skip
@click.option("--iterations", type=click.IntRange(1), default=ITERATIONS, show_default=True,
              help="Of a learned method, for each module; the papers use 20,000.")  # fmt: skip
@click.option("--samples", type=click.IntRange(2), metavar="N",
              help="Of the set, at most; all steps equally often.")  # fmt: skip
@click.option("--memory", default="4GB", show_default=True, metavar="BYTES",
              help="For inputs and outputs of one block, which decides how many samples are used, "
                   "and as much again for one call of it.")  # fmt: skip
@click.option("-s", "--seed", type=click.IntRange(0, 2**31), default=0, show_default=True,
              help="Of what is random in learning.")  # fmt: skip
@click.option("--eval-prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="Prompts of the evaluation.")  # fmt: skip
@click.option("--eval-images", type=click.IntRange(2), metavar="N",
              help=f"Pictures of the evaluation; {EVALUATED} by default.")  # fmt: skip
@click.option("--against", metavar="SET",
              help="Pictures that the original drew before, as `evaluate` leaves them in "
                   "FOLDER/reference.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FOLDER", required=True,
              help="The new model; FOLDER.work holds what is done until then.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@components_option
@device_option
@click.option("-q", "--quiet", is_flag=True, help="No progress, only the result.")
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Quantize the network of MODEL, and write a model folder with a report.

    \b
    lydite quantize embedded --bits 4 --out q4/
    lydite quantize sd3/ --method gptq --bits 4 --prompts prompts.txt --out sd3-q4/
    lydite quantize sd3/ --method taqdit --bits 4 --group channel --act-bits 8 --set set/ --out q/
    lydite quantize sd3/ --plan plan.json --set set/ --out mixed/

    Linears inside the blocks are rounded; those that compute modulation get 8 bits; embeddings,
    first and last layers stay. Interrupt it and run the same command again to resume it.
    """
    from lydite.quantize.work import work_folder

    out: Path = options["out"]
    if os.path.lexists(out):
        raise FileError(f"{at(out)}: exists already. Give another --out.")
    model = absolute_model(options["model"], options["components"])
    _check_options(ctx, options)
    _check_places(out, model, options)
    with ExitStack() as stack:
        job = _Job(ctx, options, model, work_folder(out))
        stack.enter_context(note_on_stop())
        job.run(stack)


def _check_options(ctx: click.Context, options: dict[str, Any]) -> None:
    """Refuse options that would do nothing."""
    default = click.core.ParameterSource.DEFAULT
    given = {name for name in options if ctx.get_parameter_source(name) is not default}
    decided = ("bits", "group", "convolutions") if options["format"] != "affine" else ()
    for one, others in {
        "format": decided,
        "plan_file": ("bits", "group", "bpw", "convolutions", "format"),
        "bpw": ("bits", "convolutions", "format"),
        "against": ("eval_images", "eval_prompts"),
    }.items():
        if one in given and (idle := [name for name in others if name in given]):
            words = [f"--{name.removesuffix('_file').replace('_', '-')}" for name in (one, *idle)]
            raise InputError(f"{words[0]} decides what {', '.join(words[1:])} would: leave it out.")


def _check_places(out: Path, model: "Model", options: dict[str, Any]) -> None:
    """Refuse names that cannot be recorded, and results inside what they are made from."""
    if not is_unicode(f"{model.name}{out}"):
        raise InputError("the names of MODEL and --out must be valid Unicode: they are recorded.")
    inputs = [Path(model.name), options["set_folder"], options["against"]]
    real = Path(os.path.realpath(out))
    for source in (Path(each) for each in inputs if each is not None):
        if source.exists() and real.is_relative_to(os.path.realpath(source)):
            raise FileError(f"{at(out)}: is inside the input {at(source)}. Give another --out.")
    if not real.parent.is_dir():
        raise FileError(f"{at(out.parent)}: no such folder. Make it first.")


class _Job:
    """One quantization, from the model to the finished folder."""

    def __init__(
        self, ctx: click.Context, options: dict[str, Any], model: "Model", folder: Path
    ) -> None:
        self._ctx, self._options, self._model, self._folder = ctx, options, model, folder
        self._quiet: bool = options["quiet"]

    def run(self, stack: ExitStack) -> None:
        from lydite.calibrate.model_session import model_hash, open_pipeline, require_model
        from lydite.calibrate.request_conditions import request_of
        from lydite.quantize.export import check_exportable, export
        from lydite.quantize.network import needs_set, provenance
        from lydite.quantize.provenance import NAME
        from lydite.quantize.work import MODEL, Work

        pipeline = open_pipeline(self._model, "auto")
        check_exportable(pipeline)
        settings = self._settings(pipeline)  # what cannot be done is refused first
        self._check_evaluation()
        if self._options["dry_run"]:
            self._print_plan(pipeline, settings)
            return
        work = stack.enter_context(Work.open(self._folder))
        opened = None
        if needs_set(settings) or self._options["bpw"] or self._options["set_folder"]:
            opened = self._open_set(stack)
            pipeline = open_pipeline(self._model, request_of(opened.settings.conditions)[1])
        pipeline.model.prepare()
        if opened is not None:
            require_model(opened.settings, pipeline)
        if opened is not None and self._options["bpw"]:
            settings = replace(settings, plan=self._mixed_plan(pipeline, opened))
        self._print_plan(pipeline, settings)
        described = {
            "source_model": Path(self._model.name).name,
            "source_hash": model_hash(pipeline),
            "set_hash": opened.content_hash if opened else None,
        }
        samples = self._samples(pipeline, opened) if opened else []
        work.describe({**described, "settings": settings, "samples": len(samples)})
        results = self._quantize(pipeline, opened, samples, settings, work)
        if opened is not None and settings.tune:
            results.append(self._tune(pipeline, opened, results, settings, work))
        weights = {path: weight for each in results for path, weight in each.weights.items()}
        export(pipeline, weights, self._folder / MODEL)
        record = provenance(pipeline, results, settings, described)
        write_atomic(self._folder / MODEL / NAME, record.to_json())
        if not self._quiet:
            click.echo(_proof(record))
        pipeline.model.unload()
        self._evaluate(opened)
        self._finish(work)

    def _check_evaluation(self) -> None:
        """Refuse what the evaluation at the end could not be done with."""
        from lydite.calibrate.model_session import open_pipeline, require_model
        from lydite.calibrate.request_conditions import request_of
        from lydite.calibrate.store.set_file import read_description

        options = self._options
        if options["against"] is not None:
            described = read_description(Path(options["against"]))
            pipeline = open_pipeline(self._model, request_of(described.settings.conditions)[1])
            pipeline.model.prepare()
            require_model(described.settings, pipeline)
            pipeline.model.unload()
            return
        known = (options[name] for name in ("set_folder", "prompts", "eval_prompts"))
        if self._model.name != embedded.NAME and not any(known):
            raise InputError(
                "no prompts: give --prompts FILE or --set SET. Only the embedded model has its own."
            )

    def _settings(self, pipeline: "Pipeline") -> "Settings":
        from lydite.models.layers import FLOAT_PRODUCTS
        from lydite.quantize.methods.reconstruct import short_recipe
        from lydite.quantize.plan import read_plan, uniform_plan
        from lydite.quantize.run import AFFINE_ONLY, Settings

        options = self._options
        shapes = pipeline.model.components[pipeline.family.network].expected
        group = 0 if options["group"] == "channel" else int(options["group"])
        if options["plan_file"] is not None:
            plan = read_plan(options["plan_file"], shapes)
        else:
            plan = uniform_plan(
                shapes,
                int(options["bits"]),
                group,
                convolutions=options["convolutions"],
                mode=options["format"],
            )
        modes = {each.mode for each in plan.layers.values()} - {"affine"}
        if modes and (options["method"] in (*AFFINE_ONLY, "dwq") or options["tune"]):
            raise InputError(
                f"{min(modes)} has no offsets to learn, nor steps of one size: use --method rtn or "
                "gptq, without --tune."
            )
        coarse = any(each.group == 0 and each.bits <= 4 for each in plan.layers.values())
        if options["method"] == "smoothquant" and coarse:
            raise InputError(
                "smoothquant makes weights of some inputs much larger, and one scale for each "
                "channel in 4 bits then loses the others. Give --group 64, or --bits 8."
            )
        if options["method"] in ("taqdit", "smoothquant", "ptq4dit") and not options["act_bits"]:
            raise InputError(f"{options['method']} rounds activations too: add --act-bits 8.")
        if options["act_groups"] > 1 and not options["act_bits"]:
            raise InputError("--act-groups are groups of ranges of activations: add --act-bits 8.")
        if options["quantize_input"] and (options["act_bits"] or not modes & {*FLOAT_PRODUCTS}):
            raise InputError(
                "--quantize-input rounds inputs to the format of the weights: give --format nvfp4 "
                "or mxfp8, without --act-bits."
            )
        if options["bpw"] and options["dry_run"]:
            raise InputError(
                "--bpw measures every layer first. Instead of --dry-run, use `lydite quantize plan "
                "MODEL --bpw`."
            )
        is_dwq = options["method"] == "dwq"
        return Settings(
            "rtn" if is_dwq else options["method"],
            plan,
            options["act_bits"],
            act_groups=options["act_groups"],
            quantize_input=options["quantize_input"],
            recipe=short_recipe(options["iterations"], options["seed"], bool(options["act_bits"])),
            rank=options["rank"] or 0,
            tune=options["tune"] or (TUNED if is_dwq else 0),
            start="gptq" if options["method"] in ("adaround", "joint") else "weights",
        )

    def _mixed_plan(self, pipeline: "Pipeline", opened: "CalibrationSet") -> "Plan":
        """Bits of each layer by its measured sensitivity."""
        from lydite.quantize.mixed import mixed_plan
        from lydite.quantize.run import CALIBRATED
        from lydite.quantize.sensitivity import measure_sensitivity

        group = 0 if self._options["group"] == "channel" else int(self._options["group"])
        stop = StopRequest()
        with SampleBar(quiet=self._quiet, unit="layer") as bar, stop.listening():
            sensitivity = measure_sensitivity(
                pipeline, opened, group=group, on_layer=bar.done, stopping=lambda: stop.asked
            )
        shapes = pipeline.model.components[pipeline.family.network].expected
        calibrated = self._options["method"] in CALIBRATED
        return mixed_plan(shapes, sensitivity, self._options["bpw"], calibrated=calibrated)

    def _print_plan(self, pipeline: "Pipeline", settings: "Settings") -> None:
        if self._quiet and not self._options["dry_run"]:
            return
        from lydite.weights.quantize import bits_per_weight, bytes_in_memory

        component = pipeline.model.components[pipeline.family.network]
        shapes, plan = component.expected, settings.plan
        before = bytes_in_memory(shapes, 2)
        formats = plan.formats(shapes, settings.rank)
        after = bytes_in_memory(shapes, 2, formats)
        counts = Counter(each.bits for each in plan.layers.values())
        widths = ", ".join(f"{count} in {bits} bits" for bits, count in sorted(counts.items()))
        click.echo(
            f"{pipeline.family.network}: {len(plan.layers)} layers ({widths}), "
            f"{bits_per_weight(formats, shapes):.2f} bits per weight; {size_text(before)} in 16 "
            f"bits → {size_text(after)}. Method {settings.method}{_inputs_text(settings)}."
        )

    def _open_set(self, stack: ExitStack) -> "CalibrationSet":
        from lydite.calibrate.store.reader import CalibrationSet
        from lydite.quantize.work import SET

        folder = self._options["set_folder"]
        if folder is None:
            folder = self._folder / SET
            self._make_set(folder)
        opened = stack.enter_context(CalibrationSet.open(folder))
        if opened.missing():
            raise InputError(f"{at(folder)}: the set is not complete. Resume it first.")
        return opened

    def _make_set(self, folder: Path) -> None:
        """Draw a small calibration set."""
        from lydite.cli.calibrate.run import run

        prompts = self._options["prompts"]
        if prompts is None:
            if self._model.name != embedded.NAME:
                raise InputError(
                    "no calibration set: give --set SET, or --prompts FILE and a small one is "
                    "drawn. Only the embedded model has prompts of its own."
                )
            from lydite.embedded.captions import training_prompts

            prompts = self._folder / "prompts.txt"
            texts = [prompt.text for prompt in training_prompts(SET_IMAGES, SET_SEED)]
            write_atomic(prompts, ("\n".join(texts) + "\n").encode())
        if not self._quiet:
            click.echo(f"drawing a calibration set of {SET_IMAGES} images.", err=True)
        self._ctx.invoke(
            run,
            prompts=prompts,
            images=SET_IMAGES,
            model=self._model.name,
            components=self._model.components,
            out=folder,
            quiet=self._quiet,
        )

    def _memory(self) -> int:
        from lydite.cli.recording import read_bytes

        return read_bytes(self._options["memory"], "--memory")

    def _samples(self, pipeline: "Pipeline", opened: "CalibrationSet") -> "list[Row]":
        from lydite.quantize.blocks import choose_samples
        from lydite.quantize.network import sample_bytes

        size = sample_bytes(pipeline, opened)
        chosen = choose_samples(opened, size, self._memory(), self._options["samples"])
        if not self._quiet:
            total = sum(1 for _ in opened.rows("sample"))
            click.echo(
                f"{len(chosen)} of {total} samples of the set, {size_text(len(chosen) * size)} in "
                "memory.",
                err=True,
            )
        return chosen

    def _quantize(
        self,
        pipeline: "Pipeline",
        opened: "CalibrationSet | None",
        samples: "list[Row]",
        settings: "Settings",
        work: "Work",
    ) -> "list[BlockResult]":
        from lydite.quantize.network import count_steps, quantize_network

        stop = StopRequest()
        steps = count_steps(pipeline, settings, work.results())
        unit = "iteration" if steps.learned else "block"
        with StepBar(steps.total, quiet=self._quiet, unit=unit) as bar, stop.listening():

            def stepped(path: str, step: int, loss: float) -> None:
                bar.advance()
                if stop.asked:
                    raise KeyboardInterrupt

            def finished(result: "BlockResult") -> None:
                if not steps.learned:
                    bar.advance()
                for error in result.errors if not self._quiet else ():
                    bar.print(f"{error.path}: error {error.nearest:.4f} → {error.after:.4f}")
                if stop.asked:
                    raise KeyboardInterrupt

            return quantize_network(
                pipeline,
                opened,
                samples,
                settings,
                work,
                call_bytes=self._memory(),
                on_step=stepped,
                on_block=finished,
            )

    def _tune(
        self,
        pipeline: "Pipeline",
        opened: "CalibrationSet",
        results: "list[BlockResult]",
        settings: "Settings",
        work: "Work",
    ) -> "BlockResult":
        from lydite.quantize.network import tune_network

        stop = StopRequest()
        with StepBar(settings.tune, quiet=self._quiet, unit="iteration") as bar, stop.listening():

            def stepped(step: int, loss: float) -> None:
                bar.advance()
                if stop.asked:
                    raise KeyboardInterrupt

            result = tune_network(pipeline, opened, results, settings, work, stepped)
        (error,) = result.errors
        if not self._quiet:
            verdict = "" if result.weights else "; nothing was gained, so nothing is changed"
            click.echo(f"network: error {error.nearest:.4f} → {error.after:.4f}{verdict}")
        return result

    def _evaluate(self, opened: "CalibrationSet | None") -> None:
        """Draw with the original and with the result; evaluation.json is the record."""
        from lydite.calibrate.request_conditions import request_of
        from lydite.calibrate.store.set_file import read_description
        from lydite.cli.evaluate.models import CANDIDATE, RECORD, draw_side, record_of
        from lydite.cli.evaluate.two_sets import compare_sets
        from lydite.evaluate.evaluation import Evaluation, Options
        from lydite.evaluate.pictures import SetPictures
        from lydite.quantize.work import EVALUATION, MODEL
        from lydite.report.evaluation import page

        out, made = self._folder / EVALUATION, self._folder / MODEL
        reference = Path(self._options["against"] or self._draw_original(out, opened))
        candidate, described = out / CANDIDATE, read_description(reference)
        request, dtype = request_of(described.settings.conditions)
        model = absolute_model(str(made), None)
        settings = WorkerOptions(1, None, self._quiet)
        draw_side(candidate, model, dtype, request, described.plan, settings, self._again())
        found: list[Evaluation] = []
        compare_sets(
            reference,
            candidate,
            Options(),
            {"quiet": self._quiet, "as_json": False, "html": None},
            lambda one, other: record_of(one, other, {"bits": None}),
            lambda evaluation: found.append(evaluation) or evaluation,
        )
        write_atomic(made / RECORD, found[0].to_json())
        with (
            closing(SetPictures.open(reference)) as one,
            closing(SetPictures.open(candidate)) as other,
        ):
            write_atomic(made / REPORT, page(found[0], one, other))

    def _again(self) -> str:
        """The command that resumes it."""
        from lydite.calibrate.store.writer import command_line

        return command_line("lydite", "quantize", *typed_arguments(self._ctx, ()))

    def _draw_original(self, out: Path, opened: "CalibrationSet | None") -> Path:
        """Pictures of the original with the settings of the calibration set."""
        from lydite.calibrate.model_session import open_pipeline
        from lydite.calibrate.request_conditions import request_of
        from lydite.calibrate.settings import plan_of
        from lydite.cli.evaluate.models import REFERENCE, draw_side, evaluated_images
        from lydite.core.request import Request

        prompts = self._options["eval_prompts"] or self._options["prompts"]
        if prompts is None and opened is not None and self._model.name != embedded.NAME:
            prompts = self._folder / "evaluation_prompts.txt"
            texts = list(dict.fromkeys(image.prompt for image in opened.plan.images))
            write_atomic(prompts, ("\n".join(texts) + "\n").encode())
        images = evaluated_images(
            {
                "prompts": prompts,
                "images": self._options["eval_images"] or EVALUATED,
                "seed": SEED_OF_EVALUATION,
            },
            self._model,
        )
        request, dtype = Request(""), "auto"
        if opened is not None:
            request, dtype = request_of(opened.settings.conditions)
        run = open_pipeline(self._model, dtype).plan(request)
        plan = plan_of(images, tuple(range(run.steps)))
        settings = WorkerOptions(1, None, self._quiet)
        folder = out / REFERENCE
        draw_side(folder, self._model, dtype, run.request, plan, settings, self._again())
        return folder

    def _finish(self, work: "Work") -> None:
        from lydite.core.files import move
        from lydite.quantize.work import EVALUATION, MODEL

        move(self._folder / EVALUATION, self._folder / MODEL / EVALUATION)
        move(self._folder / MODEL, self._options["out"])
        work.finish()
        out = self._options["out"]
        click.echo(f"report {out / REPORT}")
        if not self._quiet:
            click.echo(f"{out}: finished. Draw with it: lydite generate PROMPT --model {at(out)}")


def _proof(record: "Provenance") -> str:
    """In a sentence: was anything learned?"""
    shares = list(record.changed.values())
    text = (
        f"{100 * sum(shares) / len(shares):.1f} % of the integers differ from rounding to nearest"
    )
    if record.units:
        text += (
            f"; error of held-out rows smaller in {record.improved} of {len(record.units)} units"
        )
    return f"{text}."


def _inputs_text(settings: "Settings") -> str:
    """How inputs are rounded."""
    from lydite.models.layers import has_quantized_product

    if settings.quantize_input:
        modes = {each.mode for each in settings.plan.layers.values()} - {"affine"}
        real = all(map(has_quantized_product, modes))
        return f", activations in {min(modes)}, {'mx.qqmm' if real else 'simulated'}"
    if settings.act_bits is None:
        return ""
    groups = settings.act_groups
    ranges = f" with ranges for {groups} groups of steps" if groups > 1 else ""
    return f", activations in {settings.act_bits} bits{ranges}, simulated"
