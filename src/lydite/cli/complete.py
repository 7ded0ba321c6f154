"""Shell completion of the names of samplers, schedules and conventions."""

from collections.abc import Callable, Iterable, Mapping

import click
from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _samplers() -> Mapping[str, str]:
    from lydite.sampling.registry import SAMPLERS

    return {name: each.about for name, each in SAMPLERS.items()}


def _schedules() -> Mapping[str, str]:
    from lydite.sampling.registry import SCHEDULES

    return {name: each.about for name, each in SCHEDULES.items()}


def _conventions() -> Iterable[str]:
    from lydite.sampling.program_conventions import CONVENTIONS

    return CONVENTIONS


def _complete(*sources: Callable[[], Mapping[str, str]]) -> Complete:
    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = {name: about for source in sources for name, about in source().items()}
        return [
            CompletionItem(name, help=about or None)
            for name, about in names.items()
            if name.startswith(incomplete)
        ]

    return complete


complete_sampler = _complete(_samplers)
complete_schedule = _complete(_schedules)
complete_sampler_or_schedule = _complete(_samplers, _schedules)
complete_convention = _complete(lambda: dict.fromkeys(_conventions(), ""))
