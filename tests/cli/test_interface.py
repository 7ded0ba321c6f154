"""The command line that scripts rely on: every option of every verb, its default and its limits."""

from collections.abc import Iterator
from pathlib import Path

import click

from lydite.cli.main import lydite
from lydite.cli.trace.check import command as trace_check
from lydite.cli.trace.show import command as trace_show

# Written by `python tests/cli/test_interface.py`; a difference is a change for users.
KNOWN = Path(__file__).parents[1] / "data" / "command_line.txt"


def verbs(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command by its words."""
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        if isinstance(found, click.Group):
            yield from verbs(found, (*words, name))
        elif found:
            yield " ".join((*words, name)), found


def described(parameter: click.Parameter) -> str:
    """Names, type, limits and default in a line."""
    info = parameter.to_info_dict()
    kind = info["type"]
    old: tuple[str, ...] = getattr(parameter, "_old", ())
    facts = ["/".join((*parameter.opts, *parameter.secondary_opts, *old)), kind["param_type"]]
    if kind.get("min") is not None or kind.get("max") is not None:
        facts.append(f"{kind['min']}..{kind['max']}")
    facts += kind.get("choices", ())
    facts += [name for name in ("min_open", "max_open", "clamp", "exists") if kind.get(name)]
    facts += [name for name in ("required", "multiple", "is_flag", "hidden") if info.get(name)]
    if parameter.nargs != 1:
        facts.append(f"nargs={parameter.nargs}")
    if isinstance(parameter.default, (str, int, float, Path)) and not info.get("is_flag"):
        shown = isinstance(parameter, click.Option) and parameter.show_default
        facts.append(f"{'shows ' if shown else ''}default={parameter.default}")
    return " ".join(facts)


def interface() -> str:
    return "".join(
        f"{words}\n" + "".join(f"  {described(each)}\n" for each in command.params)
        for words, command in (
            *verbs(lydite),
            ("trace check", trace_check),
            ("trace show", trace_show),
        )
    )


def test_options_defaults_and_limits_change_only_on_purpose() -> None:
    assert interface().splitlines() == KNOWN.read_text().splitlines()


def test_every_option_says_what_it_is_for() -> None:
    for words, command in verbs(lydite):
        for each in command.params:
            if isinstance(each, click.Option) and not each.hidden:
                assert each.help, (words, each.opts)


if __name__ == "__main__":
    KNOWN.write_text(interface())
