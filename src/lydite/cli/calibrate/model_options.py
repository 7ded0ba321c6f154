"""The model of a set: its options, how it is opened; and a progress bar of samples."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from lydite import embedded
from lydite.cli.progress import StepBar
from lydite.cli.request_options import device_option

if TYPE_CHECKING:
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.pipelines.pipeline import Pipeline

F = TypeVar("F", bound=Callable[..., Any])


def model_options(command: F) -> F:
    """Where the set's model is."""
    options = (
        click.option("-m", "--model", metavar="FOLDER|FILE|HUB-ID",
                     help="As for `lydite generate`; by default the set's own."),
        click.option("--components", metavar="FOLDER",
                     help="Take what MODEL lacks (text encoders, tokenizers, VAE) from here."),
        device_option,
        click.option("-q", "--quiet", is_flag=True, help="No progress bar, only errors."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def open_model(opened: "CalibrationSet", model: str | None, components: str | None) -> "Pipeline":
    """The model of a set, nothing of it loaded yet."""
    from lydite.calibrate.model_session import Model, open_pipeline
    from lydite.calibrate.request_record import request_of

    _, dtype = request_of(opened.settings.conditions)
    name = model or opened.settings.model or embedded.NAME
    return open_pipeline(Model(name, components, fetch=model is not None), dtype)


def model_words(model: str | None, components: str | None) -> list[str]:
    """The options again, for a command in a message."""
    given = {"--model": model, "--components": components}
    return [word for name, value in given.items() if value for word in (name, value)]


@contextmanager
def note_on_stop() -> Iterator[None]:
    """Prints, when the user stops it, that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("stopped; what is done is saved. The same command resumes it.", err=True)
        raise


class SampleBar:
    """Counts samples, or other things, on stderr."""

    def __init__(self, *, quiet: bool, unit: str = "step") -> None:
        self._quiet, self._unit, self._stack = quiet, unit, ExitStack()
        self._bar: StepBar | None = None

    def done(self, number: int, total: int) -> None:
        """Sample `number` of `total` is done."""
        if self._bar is None:
            bar = StepBar(total - number + 1, quiet=self._quiet, unit=self._unit)
            self._bar = self._stack.enter_context(bar)
        self._bar.advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
