"""Options of metrics and their output, the same for all commands of `lydite evaluate`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.table import Table

from lydite.cli.request_options import apply_options, overwrite_option
from lydite.cli.tables import wide_console
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.evaluate.evaluation import Evaluation, Options
    from lydite.evaluate.pictures import PictureSource

F = TypeVar("F", bound=Callable[..., Any])
SHOWN = 5  # worst pairs, and never more than a third of all

METRICS = (
    click.option("--lpips", nargs=3, multiple=True, metavar="alex|vgg BACKBONE HEADS",
                 help="LPIPS: torchvision's weights of the backbone and lpips' of the heads, as "
                      "safetensors files."),
    click.option("--inception", type=click.Path(path_type=Path), metavar="FILE",
                 help="FID, sFID, KID, precision, recall, Inception score: weights of FID's "
                      "Inception-v3, a safetensors file."),
    click.option("--resize", type=click.Choice(("clean", "legacy_tensorflow", "legacy_pytorch")),
                 default="clean", show_default=True,
                 help="How pictures are resized for --inception, by clean-fid's names."),
    click.option("--clip", type=click.Path(path_type=Path), metavar="FOLDER",
                 help="CLIP score, CLIP-FID, CMMD: the folder of a CLIP model of transformers."),
    click.option("--no-cache", is_flag=True, help="Compute all features again."),
    click.option("--html", type=click.Path(path_type=Path), metavar="PAGE",
                 help="Also write a page: table, error over steps, the worst pairs to look at."),
    overwrite_option,
    click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
)  # fmt: skip


def metric_options(command: F) -> F:
    """Networks of metrics, page and JSON."""
    return apply_options(METRICS, command)


def read_metrics(options: dict[str, Any]) -> "Options":
    """Load the networks that the user has weights of."""
    from lydite.core.files import cache_folder
    from lydite.evaluate.evaluation import Networks, Options
    from lydite.evaluate.feature_table import CACHE
    from lydite.evaluate.features import load_features, load_lpips

    lpips: list[Any] = []
    for net, backbone, heads in options["lpips"]:
        if net not in ("alex", "vgg"):
            raise InputError(f"--lpips {net}: expected alex or vgg, then two files.")
        lpips.append(load_lpips(net, Path(backbone), Path(heads)))
    if len({one.net for one in lpips}) < len(lpips):
        raise InputError("--lpips: give each network once.")
    inception, clip = options["inception"], options["clip"]
    networks = Networks(
        load_features("inception", inception, resize=options["resize"]) if inception else None,
        load_features("clip", clip) if clip else None,
        tuple(lpips),
    )
    folder = None if options["no_cache"] else cache_folder()
    return Options(networks, None if folder is None else folder / CACHE)


def check_page(options: dict[str, Any], inputs: Sequence[Path | str | None]) -> None:
    """Refuse a page that cannot be written or would replace an input, before the work."""
    from lydite.core.outputs import check_output

    if options["html"] is not None:
        lpips = [name for _, *files in options["lpips"] for name in files]
        given = [*inputs, options["inception"], options["clip"], *lpips]
        paths = [Path(name) for name in given if name]
        check_output(options["html"], overwrite=options["overwrite"], inputs=paths)


def print_evaluation(
    evaluation: "Evaluation",
    reference: "PictureSource",
    candidate: "PictureSource",
    options: dict[str, Any],
) -> None:
    """The result on stdout, as JSON or as tables, and as a page."""
    from lydite.core.outputs import write_output
    from lydite.evaluate.evaluation import FRECHET_JUDGE, GROWTH, MEANINGS, identical_text

    if options["html"] is not None:
        from lydite.report.evaluation import page

        html = page(evaluation, reference, candidate)
        write_output(options["html"], html, overwrite=options["overwrite"])
    if options["as_json"]:
        click.echo(evaluation.to_json().decode(), nl=False)
        return
    console = wide_console()
    if evaluation.paired:
        console.print(_paired_table(evaluation))
    if evaluation.distribution:
        console.print(_distribution_table(evaluation))
        if FRECHET_JUDGE in evaluation.distribution:
            click.echo(f"{FRECHET_JUDGE}: {MEANINGS[FRECHET_JUDGE]}")
    if evaluation.growth is not None and len(evaluation.steps) > 1:
        click.echo(
            f"latent_error at step {evaluation.steps[-1].step}: "
            f"{evaluation.steps[-1].error.mean:.3g}; it grows by a factor of "
            f"{evaluation.growth:.3g} a step ({MEANINGS[GROWTH]})."
        )
    for row in evaluation.flat_field:
        click.echo(
            f"flat field, {row['steps']} steps: noise {row['reference']:.2f} in the reference, "
            f"{row['candidate']:.2f} in the candidate (of 255)"
        )
    if evaluation.identical:
        click.echo(identical_text(evaluation.identical))
    for pair in evaluation.worst[: min(SHOWN, _pairs(evaluation) // 3)]:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in pair.metrics.items())
        click.echo(f"worst  {pair.name}  {figures}" + (f"  “{pair.prompt}”" if pair.prompt else ""))
    for warning in evaluation.warnings:
        click.echo(f"note: {warning}", err=True)
    if options["html"] is not None:
        click.echo(f"page   {options['html']}")


def _pairs(evaluation: "Evaluation") -> int:
    return max((summary.n for summary in evaluation.paired.values()), default=0)


def _paired_table(evaluation: "Evaluation") -> Table:
    from lydite.evaluate.evaluation import lower_is_better

    table = Table("paired", "mean", "95 % interval", "median", "worst", "pictures", box=None)
    for name, summary in evaluation.paired.items():
        lower = lower_is_better(name)
        interval = f"{summary.ci95[0]:.4g} to {summary.ci95[1]:.4g}" if summary.ci95 else "–"
        table.add_row(
            name,
            f"{summary.mean:.4g}",
            interval,
            f"{summary.median:.4g}",
            f"{summary.max if lower else summary.min:.4g}",
            str(summary.n),
        )
    return table


def _distribution_table(evaluation: "Evaluation") -> Table:
    table = Table("sets", "value", "95 % interval", "pictures", box=None)
    for name, distance in evaluation.distribution.items():
        interval = f"{distance.ci95[0]:.4g} to {distance.ci95[1]:.4g}" if distance.ci95 else ""
        counts = " and ".join(str(count) for count in distance.n)
        table.add_row(name, f"{distance.value:.5g}", interval, counts)
    return table
