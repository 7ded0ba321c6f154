"""Shell completion of names; see `lydite generate --help` for how to switch it on."""

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem


def complete_sampler(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from lydite.sampling.samplers import SAMPLERS

    return _items(((each.name, each.about) for each in SAMPLERS.values()), incomplete)


def complete_schedule(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from lydite.sampling.schedules import SCHEDULES

    return _items(((each.name, each.about) for each in SCHEDULES.values()), incomplete)


def complete_sampler_or_schedule(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    samplers = complete_sampler(ctx, param, incomplete)
    return samplers + complete_schedule(ctx, param, incomplete)


def complete_convention(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from lydite.sampling.conventions import CONVENTIONS

    return _items(((name, "") for name in CONVENTIONS), incomplete)


def _items(names: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(name, help=about or None)
        for name, about in names
        if name.startswith(incomplete)
    ]
