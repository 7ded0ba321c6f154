"""`lydite trace check`: what one trace shows without a reference."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click


@click.command("check")
@click.argument("folder", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(folder: Path, as_json: bool) -> None:
    """Read TRACE by itself: NaN and its origin, the range of float16, constant or saturated values,
    blocks whose values explode or vanish, attention on one token, steps that hardly move.

    \b
    lydite trace check port
    lydite trace check port --json

    Statistics are enough; where values were kept, attention is measured too. A port that is healthy
    may still be wrong: `lydite diff` compares it with a reference. Exit status: 0 nothing serious,
    1 something serious, 2 no trace.
    """
    from lydite.diff.trace_health import examine
    from lydite.trace.reader import Trace

    with Trace.open(folder) as trace:
        remarks = examine(trace)
        events = sum(event.kind != "selftest" for event in trace.events)
        lost = trace.lost
    serious = sum(remark.serious for remark in remarks)
    if as_json:
        rows = [asdict(remark) for remark in remarks]
        click.echo(json.dumps({"values": events, "lost": lost, "remarks": rows}, indent=1))
    else:
        for remark in remarks:
            click.echo(f"{'serious' if remark.serious else 'note':<8} {remark.sentence}")
        if lost:
            click.echo(f"note     {lost} values at the end were lost in a crash")
        found = f"{serious} serious" if serious else "nothing serious"
        click.echo(f"{events:,} values: {found}, {len(remarks) - serious} notes")
    if serious:
        sys.exit(1)
