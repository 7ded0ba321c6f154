"""Where tables are printed."""

from rich.console import Console


def wide_console() -> Console:
    """A file or a pipe gets a wide table whole, a terminal what fits its width."""
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, width=240)
