"""Exports of one model as a page: figures in a table, pictures side by side."""

from collections.abc import Sequence

from lydite.core.errors import counted
from lydite.core.files import size_text
from lydite.evaluate.intervals import Summary
from lydite.pipelines.picture import Pixels
from lydite.quantize.compare_exports import Export, Pictures, Row
from lydite.report.contact_sheets import png_bytes, scale_to_width
from lydite.report.page import (
    Block,
    Callout,
    Chapter,
    Figure,
    Figures,
    Page,
    Table,
    Text,
    render,
)

WIDEST = 384  # pixels of a picture on the page
LEAD = (
    "Each export drew the same prompts from the same noise as the original. A mean is followed by "
    "its 95 % confidence interval. Units improved: modules whose error on held-out rows is smaller "
    "than with rounding to nearest."
)
HEAD = (
    "export",
    "method",
    "bits per weight",
    "size",
    "PSNR, mean",
    "median",
    "SSIM",
    "latent error",
    "units improved",
    "integers changed",
)


def table_rows(exports: Sequence[Export]) -> tuple[tuple[str, ...], ...]:
    """The cells under HEAD, for a page and for a terminal."""
    return tuple(_cells(export) for export in exports)


def _cells(export: Export) -> tuple[str, ...]:
    made, psnr = export.provenance, export.metric("psnr")
    units = f"{made.improved} of {len(made.units)}" if made.units else "–"
    return (
        export.name,
        made.method_text,
        f"{made.bits_per_weight:.2f}",
        size_text(made.bytes_after),
        _mean(psnr, ".2f"),
        "–" if psnr is None else f"{psnr.median:.2f}",
        _mean(export.metric("ssim"), ".4f"),
        _mean(export.metric("latent_error"), ".3g"),
        units,
        f"{100 * export.changed:.1f} %",
    )


def _mean(summary: Summary | None, form: str) -> str:
    if summary is None:
        return "–"
    if summary.ci95 is None:
        return f"{summary.mean:{form}}"
    low, high = summary.ci95
    return f"{summary.mean:{form}} ({low:{form}} to {high:{form}})"


def page(exports: Sequence[Export], pictures: Pictures | None, warnings: Sequence[str]) -> bytes:
    """The page of a comparison."""
    numeric = frozenset(range(2, len(HEAD)))
    blocks: list[Block] = [Callout(text, "warn") for text in warnings]
    blocks.append(Table(HEAD, table_rows(exports), numeric))
    chapters = [Chapter("Figures", LEAD, tuple(blocks))]
    if pictures is None:
        text = "The sets of pictures are not beside the exports, so there are none to look at."
        chapters.append(Chapter("Pictures", text))
    else:
        names = [export.name for export in exports]
        for title, text, rows in (
            ("The worst pictures", "By PSNR, mean over the exports.", pictures.worst),
            ("Pictures in the middle", "About half of all pictures are better.", pictures.median),
        ):
            if rows:
                chapters.append(Chapter(title, text, _rows(rows, names)))
    chapters.append(Chapter("Record", "How each export was made.", _records(exports)))
    source = exports[0].provenance.source_model
    lead = f"{counted(len(exports), 'export')} of {source}."
    return render(
        Page(f"{source}, quantized", lead, tuple(chapters), (), "lydite quantize compare")
    )


def _rows(rows: Sequence[Row], names: Sequence[str]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for row in rows:
        figures = [_figure(row.reference, row.prompt, "original")]
        for pixels, name, value in zip(row.pictures, names, row.psnr, strict=True):
            figures.append(_figure(pixels, row.prompt, name, f"PSNR {value:.2f}"))
        blocks += [Text(row.prompt), Figures(tuple(figures), size="small")]
    return tuple(blocks)


def _figure(pixels: Pixels, prompt: str, name: str, note: str = "") -> Figure:
    small = scale_to_width(pixels, WIDEST) if pixels.shape[1] > WIDEST else pixels
    return Figure(png_bytes(small), f"{name}: {prompt}", name, note)


def _records(exports: Sequence[Export]) -> tuple[Block, ...]:
    head = ("name", *(export.name for export in exports))
    made = [export.provenance for export in exports]
    rows: list[tuple[str, ...]] = [
        ("lydite, mlx", *(f"{each.lydite}, {each.mlx}" for each in made)),
        ("model", *(f"{each.source_model} {each.source_hash[:12]}" for each in made)),
        ("calibration set", *((each.set_hash or "none")[:12] for each in made)),
        ("layers", *(str(len(each.changed)) for each in made)),
        ("seed", *(str(each.seed) for each in made)),
    ]
    keys = dict.fromkeys(key for each in made for key in each.settings)
    rows += [(key, *(_short(each.settings.get(key)) for each in made)) for key in keys]
    return (Table(head, tuple(rows)),)


def _short(value: object) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]} …"
