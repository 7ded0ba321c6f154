"""`lydite quantize compare A B …`: exports of one model in one table."""

from pathlib import Path

import click
from rich.table import Table

from lydite.cli.request_options import overwrite_option
from lydite.cli.safe_streams import escape
from lydite.cli.tables import wide_console
from lydite.core.errors import InputError


@click.command("compare")
@click.argument("folders", metavar="EXPORT…", nargs=-1, required=True,
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("--against", type=click.Path(path_type=Path), metavar="SET",
              help="Set that the original drew, for the pictures of the page; by default "
                   "EXPORT/evaluation/reference.")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), metavar="PAGE",
              help="Also write a page, with pictures side by side where the sets are "
                   "there.")  # fmt: skip
@overwrite_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    folders: tuple[Path, ...],
    against: Path | None,
    html: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Compare folders that `lydite quantize` made, in one table.

    It has the method, bits per weight, size, PSNR and SSIM against the original's pictures, the
    error of the latents, and in how many modules the error became smaller.

    \b
    lydite quantize compare rtn4/ gptq4/ mixed/
    lydite quantize compare rtn4/ gptq4/ --html page.html
    """
    from lydite.core.outputs import check_output, write_output
    from lydite.quantize.compare_exports import (
        choose_pictures,
        differences,
        on_common_pictures,
        read_exports,
    )

    if html is not None:
        given = [*folders, *([against] if against else [])]
        check_output(html, overwrite=overwrite, inputs=given)
    elif against is not None:
        raise InputError("--against is for the page: give --html PAGE too.")
    exports, notes = on_common_pictures(read_exports(folders), against)
    warnings = [*notes, *differences(exports, common=bool(notes))]
    if html is not None:
        from lydite.report.quantization import page

        data = page(exports, choose_pictures(exports, against), warnings)
        write_output(html, data, overwrite=overwrite)
    if as_json:
        import msgspec

        found = {"exports": [export.figures() for export in exports], "warnings": warnings}
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1))
        return
    from lydite.report.quantization import HEAD, table_rows

    table = Table(*HEAD, box=None)
    for row in table_rows(exports):
        table.add_row(*map(escape, row))
    wide_console().print(table)
    for warning in warnings:
        click.echo(f"note: {warning}", err=True)
    if html is not None:
        click.echo(f"page   {html}")
