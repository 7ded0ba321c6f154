"""What a seeded bug is, and the list of all bugs and controls.

The true site of a bug is the FIRST wrong value in the reference's order of execution, as a trace
names it: `scope/module.path` and a slot. A bug in the code between modules shows first as the input
of the next module or the output of the enclosing one. Where one array is recorded at several sites
(a module's input and its first child's), the bug names one of them and the score counts the others
as the same. More than one site is listed only for arrays that go wrong together, such as the two
slices of one attention.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

from lydite.pipelines.pipeline import Pipeline

Apply = Callable[[Pipeline], AbstractContextManager[Any]]
Dump = Callable[[str, Any], Any]  # name and array -> the array as the port writes it to its trace

# fatal: noise or nonsense; visible: another picture; subtle: a person would not see it
Severity = Literal["fatal", "visible", "subtle"]
Part = Literal["draw", "encode"]
BOTH = ("float32", "bfloat16")
FILES = {  # the model that gets the bugs: their modules
    "sd3": (
        *("weights", "norms", "attention", "text_attention", "modulation"),
        *("layout", "schedule", "sampling", "text"),
    ),
    "sdxl": ("unet",),
}


class Site(NamedTuple):
    """Where a value lies: the name of a module or a stage, and its slot."""

    name: str
    slot: str = "out"

    def __str__(self) -> str:
        return self.name if self.slot == "out" else f"{self.name}:{self.slot}"


@dataclass(frozen=True)
class Bug:
    """One bug of a port, with its true site."""

    id: str
    cause: str  # machine-readable; several bugs may share one
    bug_class: str  # of docs/bug-classes.md, such as "A6"
    site: tuple[Site, ...]
    apply: Apply
    fix: str
    severity: Severity = "visible"
    # Dtypes of a port in which the error is three times the reference's own rounding at the site.
    # In others both "agree" and an alarm at the site are right: injection may find more.
    seen_in: tuple[str, ...] = BOTH
    step: int = 0  # of the first wrong value
    held_out: bool = False

    @property
    def component(self) -> str:
        return self.site[0].name.partition("/")[0]

    @property
    def part(self) -> Part:
        """The run it shows in: drawing a picture does not run the VAE's encoder."""
        name = self.site[0].name
        return "encode" if name.startswith(("vae/encoder", "pipeline/image_latents")) else "draw"


@dataclass(frozen=True)
class Control:
    """The same computation written in another way: not a bug, although bits differ."""

    id: str
    what: str
    component: str
    apply: Apply
    dump: Dump | None = None  # how the port writes its values
    exact: bool = False  # bit for bit


def outputs(*names: str) -> tuple[Site, ...]:
    """The outputs of these modules."""
    return tuple(Site(name) for name in names)


def inputs(*names: str) -> tuple[Site, ...]:
    """The first inputs of these modules."""
    return tuple(Site(name, "in.0") for name in names)


@cache
def bugs(model: str = "sd3") -> tuple[Bug, ...]:
    """Every seeded bug of a model, dev and held-out."""
    modules = [import_module(f"seeded_bugs.bugs.{name}") for name in FILES[model]]
    return tuple(bug for module in modules for bug in module.BUGS)


@cache
def controls(model: str = "sd3") -> tuple[Control, ...]:
    """Every control of a model: different code, equal result."""
    from seeded_bugs.controls import CONTROLS, UNET_CONTROLS

    return {"sd3": CONTROLS, "sdxl": UNET_CONTROLS}[model]


def find_bug(id: str) -> Bug:
    """The bug of SD3 called `id`; KeyError when there is none."""
    return {bug.id: bug for bug in bugs()}[id]
